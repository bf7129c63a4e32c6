"""An async client of `/v1/audio/transcriptions` that costs little and measures each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

ENDPOINT = "/v1/audio/transcriptions"


@dataclass(slots=True)
class Outcome:
    """`failure` is empty, or its status, such as "503", "timeout" or "malformed"."""

    latency: float = 0.0
    failure: str = ""
    error: str = ""
    text: str = ""
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    body: bytes
    content_type: str

    @classmethod
    def of(cls, audio: bytes, filename: str, fields: Mapping[str, str]) -> Upload:
        form = httpx.Request("POST", ENDPOINT, data=fields, files={"file": (filename, audio)})
        return cls(form.read(), form.headers["Content-Type"])


def form_fields(model: str, language: str) -> dict[str, str]:
    """Return a greedy request's form; without a language the server detects it."""
    fields = {"model": model, "response_format": "json", "temperature": "0"}
    return fields | ({"language": language} if language else {})


class Client:
    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.endpoint = url.rstrip("/").removesuffix("/v1") + ENDPOINT
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, upload: Upload) -> Outcome:
        """Send one request; failures are in the outcome, and only a cancellation is raised."""
        assert self._session is not None
        outcome, began_s = Outcome(), time.perf_counter()
        headers = {"Content-Type": upload.content_type}
        try:
            async with self._session.post(
                self.endpoint, data=upload.body, headers=headers
            ) as answer:
                if answer.status != 200:
                    outcome.failure = str(answer.status)
                    outcome.error = _message(await answer.read())
                elif answer.content_type == "application/json":
                    outcome.answer = json.loads(await answer.read())
                    outcome.text = str(outcome.answer["text"])
                else:
                    outcome.text = (await answer.read()).decode()
        except TimeoutError:
            outcome.failure, outcome.error = "timeout", f"no answer in {self._timeout.total} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure, outcome.error = "connection", repr(error)
        except (ValueError, LookupError, TypeError) as error:
            outcome.failure, outcome.error = "malformed", repr(error)
        outcome.latency = time.perf_counter() - began_s
        return outcome


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


async def send_all(client: Client, uploads: list[Upload], in_flight: int) -> list[Outcome]:
    """Send every upload, `in_flight` at a time; the outcomes are in the order of the uploads."""
    slots = asyncio.Semaphore(in_flight)

    async def one(upload: Upload) -> Outcome:
        async with slots:
            return await client.send(upload)

    return await asyncio.gather(*(one(upload) for upload in uploads))
