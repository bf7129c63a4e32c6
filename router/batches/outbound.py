"""Makes the HTTP calls that clients ask for: downloads of lines' URLs, and webhooks.

Each call, and each redirect, goes to the address that `router.batches.hosts` has checked. No proxy
is used, no cookie is kept, and bytes and time are limited. Webhooks are signed by the Standard
Webhooks scheme, which `client.webhooks.unwrap` of OpenAI's SDK verifies.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin

import httpx

from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.settings import BatchSettings
from router.audio.protocol import too_large
from router.batches.blobs import Blobs
from router.batches.database import telling_full_disk
from router.batches.hosts import Destination, HostRules
from router.batches.owned import Owned
from router.batches.store import OpenBatch

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 5
CONNECT_S = 10.0
SILENCE_S = 30.0  # longest wait for the next bytes
TRIES = 3
BACKOFF_S = 1.0  # before the second try; doubled before each further one
DOWNLOAD_FAILED = "download_failed"
AGENT = {"user-agent": "splitscribe", "accept": "*/*", "accept-encoding": "identity"}


class _TryAgainError(Exception):
    """The host returned a 429 or a 5xx status."""


class Caller:
    """Trusts the system's certificates, and those of SSL_CERT_FILE or else of httpx. They are read
    at the first call, since most servers make none.
    """

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def call(
        self,
        method: str,
        destination: Destination,
        headers: Mapping[str, str] = {},
        content: bytes | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; the response's body is not read yet. Raises httpx's errors."""
        client = self._client = self._client or _make_client()
        async with client.stream(
            method,
            destination.pinned_url,
            headers={**AGENT, **headers, "host": destination.authority},
            content=content,
            extensions={"sni_hostname": destination.host},
        ) as response:
            client.cookies.clear()
            yield response

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _make_client() -> httpx.AsyncClient:
    # trust_env=False: a proxy of the environment would connect to unchecked addresses.
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return httpx.AsyncClient(
        trust_env=False,
        verify=context,
        follow_redirects=False,
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        # Connections are kept by address, and would be reused for other hosts at that address.
        limits=httpx.Limits(max_keepalive_connections=0),
    )


class Downloads(Caller):
    def __init__(self, rules: HostRules, blobs: Blobs, settings: BatchSettings) -> None:
        super().__init__()
        self._rules = rules
        self._blobs = blobs
        self._max_bytes = settings.max_file_bytes
        self._timeout_s = settings.fetch_timeout_s

    async def fetch(self, url: str, path: Path, param: str) -> None:
        """Raises InvalidRequestError, PayloadTooLargeError and InsufficientStorageError."""
        backoff_s = BACKOFF_S
        for left in reversed(range(TRIES)):
            try:
                with telling_full_disk():
                    async with asyncio.timeout(self._timeout_s):
                        return await self._follow(url, path, param)
            except TimeoutError:
                raise _failed(f"it took longer than {self._timeout_s:.0f} s", param) from None
            except (httpx.InvalidURL, ValueError, TypeError) as error:  # httpx refuses the URL
                raise _failed(str(error) or "its URL is none", param) from None
            except (_TryAgainError, httpx.HTTPError, OSError) as error:
                if not left:
                    raise _failed(str(error) or type(error).__name__, param) from error
            await asyncio.sleep(backoff_s)
            backoff_s *= 2
        raise AssertionError("the last try returned or raised")

    async def _follow(self, url: str, path: Path, param: str) -> None:
        for _ in range(MAX_REDIRECTS + 1):
            destination = await self._rules.check(url, param)
            async with self.call("GET", destination) as response:
                if response.has_redirect_location:
                    url = urljoin(url, response.headers["location"])
                    continue
                if response.status_code >= 500 or response.status_code == 429:
                    raise _TryAgainError(f"the host answered {response.status_code}")
                if response.status_code != 200:
                    raise _failed(f"the host answered {response.status_code}", param)
                return await self._write(response, path, param)
        raise _failed(f"it leads through more than {MAX_REDIRECTS} redirects", param)

    async def _write(self, response: httpx.Response, path: Path, param: str) -> None:
        """Refuse compressed responses, since they may decompress to any length."""
        packed = response.headers.get("content-encoding", "identity").strip().lower()
        if packed != "identity":
            raise _failed(f"the host sent it with Content-Encoding {packed[:64]!r}", param)
        announced = response.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise too_large(self._max_bytes, int(announced))
        size_bytes = 0
        with path.open("wb") as file:
            async for piece in response.aiter_raw(1024 * 1024):
                size_bytes += len(piece)
                if size_bytes > self._max_bytes:
                    raise too_large(self._max_bytes, size_bytes)
                await asyncio.to_thread(self._put, file, piece)

    def _put(self, file: BinaryIO, piece: bytes) -> None:
        """Write by the file object, which a cancelled download closes: its descriptor is reused."""
        self._blobs.check_room(len(piece))
        file.write(piece)


def _failed(why: str, param: str) -> SplitscribeError:
    return InvalidRequestError(
        f"The audio at '{param}' could not be downloaded: {why}", param=param, code=DOWNLOAD_FAILED
    )


# ---- webhooks

PARAM = "webhook_url"
DELAYS_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)  # between tries; then none follows
ANSWER_S = 15.0  # longest time of a try
AT_ONCE = 8
UNNOTED_S = 60.0  # wait before the next try if the database could not record this one


def signature_headers(secret: str, event_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that sign a webhook. secret: `whsec_` followed by base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{event_id}.{unix_s}.".encode() + body
    mac = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": f"v1,{mac}",
    }


class Webhooks(Caller):
    def __init__(self, owned: Owned, rules: HostRules) -> None:
        super().__init__()
        self._store, self._recorder = owned.store, owned.recorder
        self._call = owned.store.database.call
        self._secret = owned.settings.webhook_secret
        self._rules = rules
        self._running: dict[str, asyncio.Task[None]] = {}

    async def check(self, url: str) -> None:
        """Raises InvalidRequestError if this server does not call `url`."""
        if self._secret is None:
            raise InvalidRequestError(
                "This server sends no webhooks; its settings batches.webhook_hosts and "
                "batches.webhook_secret turn them on.",
                param=PARAM,
                code="webhooks_not_enabled",
            )
        try:
            await self._rules.check(url, PARAM)
        except OSError as error:
            raise InvalidRequestError(
                f"the host of '{PARAM}' is not known: {error}", param=PARAM
            ) from None

    async def deliver_due(self) -> None:
        most = AT_ONCE - len(self._running)
        if self._secret is None or not most:
            return
        for batch in await self._call(self._store.due_webhooks, list(self._running), most):
            self._running[batch.id] = asyncio.create_task(self._deliver(batch, self._secret))

    async def close(self) -> None:
        """Cancel running deliveries, which stay due."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _deliver(self, batch: OpenBatch, secret: str) -> None:
        try:
            why = await self._try(batch, secret)
            may_again = bool(why) and batch.webhook_tries < len(DELAYS_S)
            delay_s = DELAYS_S[batch.webhook_tries] if may_again else None
            await self._call(self._store.note_webhook, batch.id, delay_s)
            outcome = "put_off" if may_again else "given_up" if why else "delivered"
            self._recorder.add("splitscribe_batch_webhooks_total", outcome=outcome)
            if outcome == "given_up":
                logger.warning("a webhook of %s is given up: %s", batch.id, why)
        except Exception:  # the database failed, such as on a full disk: the webhook stays due
            logger.exception("the webhook of %s was tried, which cannot be recorded", batch.id)
            await asyncio.sleep(UNNOTED_S)
        finally:
            del self._running[batch.id]

    async def _try(self, batch: OpenBatch, secret: str) -> str:
        """Send the webhook once. Return why it failed, or "" if it was accepted."""
        event = event_of(batch)
        body = json.dumps(event, separators=(",", ":")).encode()
        headers = signature_headers(secret, event["id"], self._store.now, body)
        try:
            async with asyncio.timeout(ANSWER_S):
                destination = await self._rules.check(str(batch.webhook_url), PARAM)
                async with self.call("POST", destination, headers, body) as response:
                    taken = 200 <= response.status_code < 300
                    return "" if taken else f"the host answered {response.status_code}"
        except Exception as error:
            if not isinstance(error, SplitscribeError | httpx.HTTPError | OSError):
                # Such as for a URL that httpx cannot send. This counts as a try, too.
                logger.warning("a webhook of %s cannot be sent", batch.id, exc_info=True)
            return str(error) or type(error).__name__


def event_of(batch: OpenBatch) -> dict[str, Any]:
    """Return the webhook's event. Its id is the same in every try."""
    return {
        "id": batch.id.replace("batch_", "evt_"),
        "object": "event",
        "created_at": getattr(batch, f"{batch.status}_at"),
        "type": f"batch.{batch.status}",
        "data": {"id": batch.id},
    }
