"""API keys: the valid ones, the file that lists them, and the requests each may have at once.

Every key is compared every time, as a digest in constant time, so that the time of an answer
reveals nothing. Behind the router, the owner of a key is another digest.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi.security import HTTPBearer

from cluster.common.errors import AuthenticationError, ConfigurationError, RateLimitError
from cluster.common.settings import RouterSettings
from cluster.common.settings.router import named_key
from cluster.common.settings_sources import read_api_keys

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
SHORT = 16  # characters; a shorter key causes a warning
LOOK_S = 2.0  # between two reads of the file of keys
BEARER = HTTPBearer(auto_error=False, description="one of the server's API keys")  # OpenAPI only


@dataclass(slots=True)
class _Key:
    digest: bytes
    owner: bytes  # digest that is used behind the router
    name: str  # for logs


class KeyRing:
    """The keys of one router. Without keys, everyone is let in. Used by one event loop."""

    def __init__(self, entries: Sequence[str], max_requests: int = 0) -> None:
        """max_requests: of one key at once; 0: no limit."""
        self._known: list[_Key] = []  # removed keys too, so that a number always means one key
        self.replace(entries)
        self.request_of = AtOnce("requests", max_requests).one_of

    def replace(self, entries: Sequence[str]) -> None:
        """Replace all keys. Each entry is `KEY` or `NAME KEY`."""
        numbers = set()
        for name, key in map(named_key, entries):
            digest, owner = _digest(key.encode()), _owner(key.encode())
            number = _index_of(digest, self._digests())
            is_new = number is None
            if number is None:
                number = len(self._known)
                self._known.append(_Key(digest, owner, ""))
            self._known[number].name = name or f"key_{owner.hex()[:8]}"
            if is_new and len(key) < SHORT:
                text = "the API key %s has fewer than %d characters: who guesses it comes in"
                logger.warning(text, self._known[number].name, SHORT)
            numbers.add(number)
        self._valid = numbers

    def __len__(self) -> int:
        return len(self._valid)

    def owner(self, sent: bytes | None) -> int:
        """Number of the key. Raises AuthenticationError."""
        if sent is None:
            raise AuthenticationError("no API key was sent; send 'Authorization: Bearer <key>'")
        owner = _index_of(_digest(sent), self._digests())
        if owner is None or owner not in self._valid:
            raise AuthenticationError("the API key is not valid")
        return owner

    def name(self, owner: int | None) -> str:
        return "" if owner is None else self._known[owner].name

    def owner_digest(self, owner: int | None) -> bytes:
        """The owner's digest, which separates the audio of keys; empty without keys."""
        return b"" if owner is None else self._known[owner].owner

    def owner_of_digest(self, digest: bytes) -> int | None:
        """Number of the valid key with this `owner_digest`, or None."""
        owner = _index_of(digest, [one.owner for one in self._known])
        return owner if owner in self._valid else None

    def _digests(self) -> list[bytes]:
        return [one.digest for one in self._known]


class KeyFile:
    """The settings' keys and file of keys, which is read again every `LOOK_S`. Requests of a
    removed key are finished. A file with a mistake is logged and changes nothing.
    """

    def __init__(self, settings: RouterSettings) -> None:
        """Raises ConfigurationError."""
        self._settings = settings
        self._entries = self._read()
        self._mistake = ""  # in the file when it was last read
        self.ring = KeyRing(self._entries, settings.max_requests_per_key)

    async def follow(self) -> None:
        while self._settings.api_key_file is not None:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        before = self._mistake, self._entries
        try:
            self._mistake, self._entries = "", await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            self._mistake = error.message
        if before == (self._mistake, self._entries):
            return
        if self._mistake:
            logger.error("the API keys stay as they were: %s", self._mistake)
        else:
            self.ring.replace(self._entries)
            logger.info("the API keys have changed: there are %d", len(self.ring))

    def _read(self) -> tuple[str, ...]:
        file = self._settings.api_key_file
        return (*self._settings.api_key, *(() if file is None else read_api_keys(file)))


class AtOnce:
    def __init__(self, what: str, most: int) -> None:
        """most: of one client; 0: no limit."""
        self._what, self._most = what, most
        self._running: Counter[Hashable] = Counter()

    @contextmanager
    def one_of(self, client: Hashable) -> Iterator[None]:
        """Count one until the context ends. None has no limit. Raises RateLimitError."""
        if self._most and client is not None and self._running[client] >= self._most:
            raise RateLimitError(
                f"This client has {self._most} {self._what} running, which is the most at once. "
                "Please try again when one has ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            self._running = +self._running  # drops zero counts


def sent_key(headers: Mapping[str, str], *, takes_password: bool = False) -> bytes | None:
    """The bearer key of a request, or the password of Basic authentication, or None."""
    kind, _, sent = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and sent.strip():
        return sent.strip().encode("latin-1")
    if kind.lower() == "basic" and takes_password:
        try:
            return base64.b64decode(sent.encode("latin-1")).partition(b":")[2]
        except ValueError:
            return None
    return None


def _owner(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"audio's owner").digest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _index_of(digest: bytes, known: Sequence[bytes]) -> int | None:
    equal = [hmac.compare_digest(digest, one) for one in known]
    return equal.index(True) if True in equal else None
