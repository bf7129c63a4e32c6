"""Access to realtime sessions by an API key or a client secret. A secret holds the session's
configuration, readable and signed with the cluster's key, so any router accepts it unstored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
import zlib
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket

from cluster.common.errors import AuthenticationError, InvalidRequestError
from router.http.keys import KeyRing, sent_key

SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # for browsers, which cannot set headers


def authorised(websocket: WebSocket, keys: KeyRing, secrets: ClientSecrets) -> ClientSecret:
    """Raises AuthenticationError."""
    key = sent_key(websocket.headers) or _offered_key(websocket)
    if key is not None and key.startswith(PREFIX.encode()):
        return secrets.read(key.decode("latin-1"))
    return ClientSecret(keys.owner(key) if len(keys) else None, {})


def _offered_key(websocket: WebSocket) -> bytes | None:
    for offered in websocket.scope.get("subprotocols", []):
        if offered.startswith(KEY_SUBPROTOCOL):
            return str(offered).removeprefix(KEY_SUBPROTOCOL).encode("latin-1", "replace")
    return None


PREFIX = "ek_"
MAX_LENGTH = 6_000  # characters; it is sent in one header line, of at most 8,192 characters
MIN_S, USUAL_S, MAX_S = 10, 600, 7200  # as in OpenAI's API


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """The content of a valid secret."""

    owner: int | None  # number of the API key that made it
    session: dict[str, Any]


class ClientSecrets:
    def __init__(self, cluster_key: str, keys: KeyRing) -> None:
        key = cluster_key.encode()
        self._key = hmac.new(key, b"splitscribe client secrets", hashlib.sha256).digest()
        self._keys = keys

    def issue(self, owner: int | None, session: dict[str, Any], seconds: int) -> tuple[str, int]:
        """Returns a secret for `session` and its expiry in Unix time. Raises InvalidRequestError if
        the secret is too long.
        """
        expires_at = int(time.time()) + seconds
        content = {
            "expires_at": expires_at,
            "owner": self._keys.owner_digest(owner).hex(),
            "session": session,
            "nonce": secrets.token_hex(8),  # makes every secret different
        }
        packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
        value = f"{PREFIX}{_text(packed)}.{_text(self._mac(packed))}"
        if len(value) > MAX_LENGTH:
            raise InvalidRequestError(
                f"The session's configuration makes a secret of {len(value)} characters; at "
                f"most {MAX_LENGTH} are allowed. Send a long prompt by 'session.update' instead.",
                param="session",
                code="string_above_max_length",
            )
        return value, expires_at

    def read(self, value: str) -> ClientSecret:
        """Raises AuthenticationError: not genuine, expired, or its API key was removed."""
        try:
            packed_text, mac_text = value.removeprefix(PREFIX).split(".")
            packed, mac = _bytes(packed_text), _bytes(mac_text)
        except (ValueError, binascii.Error):
            packed, mac = b"", b""
        if not hmac.compare_digest(self._mac(packed), mac):
            raise AuthenticationError("the client secret is not valid")
        content = json.loads(zlib.decompress(packed))
        if content["expires_at"] <= time.time():
            raise AuthenticationError(
                "the client secret has expired; create another one", code="client_secret_expired"
            )
        owner = self._keys.owner_of_digest(bytes.fromhex(content["owner"]))
        if len(self._keys) and owner is None:
            raise AuthenticationError("the API key that made the client secret is not valid here")
        return ClientSecret(owner, content["session"])

    def _mac(self, packed: bytes) -> bytes:
        return hmac.new(self._key, packed, hashlib.sha256).digest()


def _text(data: bytes) -> str:
    """Base64 with the characters that headers and names of sub-protocols allow."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
