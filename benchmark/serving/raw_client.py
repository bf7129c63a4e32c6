"""A load client that costs next to nothing: one request's bytes, sent again and again.

Each slot keeps one connection, sends, reads the answer by its Content-Length, and goes on. Checks
the status and that the body holds `expect`; anything else ends the run. Not a general client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmark.shared.openai_client import ENDPOINT, Upload


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of requests took."""

    wall_s: float
    latencies_ms: tuple[float, ...]

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_ms) / self.wall_s


def form_request(url: str, audio: bytes, **fields: str) -> bytes:
    """A whole HTTP request that uploads `audio` and `fields` to the transcriptions endpoint."""
    upload = Upload.of(audio, "audio.flac", fields)
    head = (
        f"POST {ENDPOINT} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: {upload.content_type}\r\nContent-Length: {len(upload.body)}\r\n\r\n"
    )
    return head.encode() + upload.body


async def send_all(url: str, request: bytes, n_requests: int, in_flight: int, expect: str) -> Load:
    """Send `request` `n_requests` times, `in_flight` of them at once."""
    latencies_ms: list[float] = []
    left = iter(range(n_requests))
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(_slot(url, request, left, expect.encode(), latencies_ms))
    return Load(time.perf_counter() - began_s, tuple(latencies_ms))


async def _slot(
    url: str, request: bytes, left: Iterator[int], expect: bytes, latencies_ms: list[float]
) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    for _ in left:
        began_s = time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        body = await reader.readexactly(length)
        if not head.startswith(b"http/1.1 200") or expect not in body:
            raise SystemExit(f"an answer was wrong: {head!r} {body[:500]!r}")
        latencies_ms.append(1000 * (time.perf_counter() - began_s))
    writer.close()
