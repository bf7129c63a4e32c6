"""HTTP calls that a client makes the server do: downloads of lines' URLs, and webhooks.

Each is made to the address that `router.batches.hosts` has checked, with the name that was asked
for in the Host header and in TLS. Redirects are followed one by one, each checked like the first.
No proxy is used and no cookie kept. Bytes and time are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urljoin

import httpx

from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.settings import BatchSettings
from router.audio.protocol import too_large
from router.batches.blobs import Blobs
from router.batches.database import telling_full_disk
from router.batches.hosts import Destination, HostRules

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 5
CONNECT_S = 10.0
SILENCE_S = 30.0  # longest wait for the next bytes
TRIES = 3
BACKOFF_S = 1.0  # before the second try; doubled before each further one
DOWNLOAD_FAILED = "download_failed"
AGENT = {"user-agent": "splitscribe", "accept": "*/*", "accept-encoding": "identity"}


class _TryAgainError(Exception):
    """The host did not answer, or said that it may later."""


class Caller:
    """It trusts the system's certificates, httpx's own, and those of SSL_CERT_FILE, which are read
    with the first request, since most servers make none.
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
        """One request; the body of its answer is not read yet. Raises httpx's errors."""
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
    """Without the environment's proxies, which would call what was not checked."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return httpx.AsyncClient(
        trust_env=False,
        verify=context,
        follow_redirects=False,
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
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
        """Write what is at `url` to `path`. Raises InvalidRequestError: it may not be called, or
        does not give what it should; PayloadTooLargeError; InsufficientStorageError.
        """
        backoff_s = BACKOFF_S
        for left in reversed(range(TRIES)):
            try:
                with telling_full_disk():
                    async with asyncio.timeout(self._timeout_s):
                        return await self._follow(url, path, param)
            except TimeoutError:
                raise _failed(f"it took longer than {self._timeout_s:.0f} s", param) from None
            except (httpx.InvalidURL, ValueError, TypeError) as error:  # of what httpx cannot send
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
        """The bytes as they come: what is packed may unfold to any length."""
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
                await asyncio.to_thread(self._put, file.fileno(), piece)

    def _put(self, handle: int, piece: bytes) -> None:
        self._blobs.check_room(len(piece))
        view = memoryview(piece)
        while view:
            view = view[os.write(handle, view) :]


def _failed(why: str, param: str) -> SplitscribeError:
    return InvalidRequestError(
        f"The audio at '{param}' could not be downloaded: {why}", param=param, code=DOWNLOAD_FAILED
    )
