"""Files and batches in this process: a service over a fake transcriber, behind real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import openai

from cluster.common.settings import BatchSettings, RouterSettings
from cluster.serve.bulk.engine import BulkEngine
from router.api.batch_bodies import Batch, CreateBatchRequest, ExpiresAfter, Purpose, UploadFields
from router.batches.database import new_id
from router.batches.service import BatchService, open_service
from router.batches.store import ENDED
from router.http.batches import BatchAccess
from router.http.listener import HttpListener
from router.http.routes import create_app
from tests.support.router_fakes import FakeTranscriber, make_registry, make_settings
from tests.support.waiting import eventually as eventually

ENDPOINT: Literal["/v1/audio/transcriptions"] = "/v1/audio/transcriptions"
AUDIO = {"input_audio": {"data": "UklGRg=="}}
DEADLINE_S = 20.0
HOUR_S = 3600


@dataclass
class Hands:
    wall_s: float = 1_800_000_000.0

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds


@dataclass
class Desk:
    service: BatchService
    transcriber: FakeTranscriber
    hands: Hands
    owner: str = ""

    async def upload(self, content: bytes, purpose: Purpose = "batch", name: str = "a") -> str:
        file_id = new_id("file-")
        await self.service.begin_upload(self.owner, file_id, len(content))
        await self.service.append(self.owner, file_id, 0, content)
        await self.service.finish_upload(
            self.owner, file_id, name, len(content), UploadFields(purpose=purpose)
        )
        return file_id

    async def create(
        self,
        input_file_id: str,
        webhook_url: str | None = None,
        kept_s: int | None = None,
        batch_id: str | None = None,
    ) -> str:
        asked = CreateBatchRequest(
            input_file_id=input_file_id,
            endpoint=ENDPOINT,
            completion_window="24h",
            output_expires_after=kept_s and ExpiresAfter(anchor="created_at", seconds=kept_s),
            webhook_url=webhook_url,
        )
        batch_id = batch_id or new_id("batch_")
        return (await self.service.create_batch(self.owner, batch_id, asked)).id

    async def run(self, *lines: bytes) -> Batch:
        return await self.ended(await self.create(await self.upload(b"".join(lines))))

    async def state(self, batch_id: str) -> Batch:
        return await self.service.batch(self.owner, batch_id)

    async def ended(self, batch_id: str) -> Batch:
        return await self.until(batch_id, lambda batch: batch.status in ENDED)

    async def until(self, batch_id: str, condition: Callable[[Batch], bool]) -> Batch:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(batch := await self.state(batch_id)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return batch

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = await self.service.read(file_id, 0)
        return [json.loads(line) for line in content.splitlines()]


@asynccontextmanager
async def desk(
    folder: Path,
    transcriber: FakeTranscriber | None = None,
    hands: Hands | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    transcriber, hands = transcriber or FakeTranscriber(), hands or Hands()
    service = await open_service(
        make_batch_settings(folder, **settings),
        BulkEngine(make_registry(transcriber)),
        unix_time=lambda: hands.wall_s,
        **(options or {}),
    )
    try:
        yield Desk(service, transcriber, hands)
    finally:
        await service.close()


def make_batch_settings(folder: Path, **changes: Any) -> BatchSettings:
    return BatchSettings(**{"folder": folder, "min_free_bytes": 0, **changes})


def line(custom_id: str, endpoint: str = ENDPOINT, **body: Any) -> bytes:
    document = {"custom_id": custom_id, "method": "POST", "url": endpoint}
    return json.dumps({**document, "body": {"model": "whisper-1", **body}}).encode() + b"\n"


def talks(n: int, **body: Any) -> bytes:
    return b"".join(line(f"l{i}", **AUDIO, **body) for i in range(n))


def outcome(batch: Batch) -> tuple[str, int, int]:
    return batch.status, batch.request_counts.completed, batch.request_counts.failed


@dataclass
class Counter:
    desk: Desk
    url: str
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        self.clients.append(
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)
        )
        return self.clients[-1]


@asynccontextmanager
async def served(
    at: Desk, router: RouterSettings | None = None, max_file_bytes: int = 10_000_000
) -> AsyncIterator[Counter]:
    app = create_app(
        make_registry(at.transcriber),
        router or make_settings(),
        batches=BatchAccess(at.service, max_file_bytes),
    )
    listener = await HttpListener.open(app, "127.0.0.1", 0)
    counter = Counter(at, f"http://127.0.0.1:{listener.port}")
    try:
        yield counter
    finally:
        for client in counter.clients:
            await client.close()
        await listener.close()
