"""How a router reaches the one process that owns files and batches, through Ray Serve.

Implements `router.batches.interface.BatchBackend`. Where the owner has just ended, or is being
replaced, a call is repeated until the next one answers: each does no harm when it comes twice.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cluster.errors import OverloadedError, WorkerGoneError
from cluster.serve.serve_pool import call_worker
from router.batches.interface import Batch, Listing, NewBatch, NewFile, Order, StoredFile

PATIENCE_S = 20.0  # an owner that died is replaced within seconds
PAUSE_S = 0.5
ANSWER_S = 60.0  # longest wait for one answer


class ServeBatches:
    """The owner's methods, behind its deployment's handle."""

    def __init__(self, handle: Any) -> None:
        # Made once: it costs as much as a small call.
        self._bound = handle.options(method_name="call", request_serialization="pickle")

    async def begin_upload(self, owner: str, upload_id: str, expected_bytes: int) -> None:
        await self._call("begin_upload", owner, upload_id, expected_bytes)

    async def append(self, upload_id: str, offset: int, piece: bytes) -> None:
        await self._call("append", upload_id, offset, piece)

    async def finish_upload(self, owner: str, file: NewFile) -> StoredFile:
        stored: StoredFile = await self._call("finish_upload", owner, file)
        return stored

    async def abort_upload(self, upload_id: str) -> None:
        await self._call("abort_upload", upload_id)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        found: StoredFile = await self._call("file", owner, file_id)
        return found

    async def list_files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> Listing[StoredFile]:
        found: Listing[StoredFile] = await self._call(
            "list_files", owner, after, limit, order, purpose
        )
        return found

    async def delete_file(self, owner: str, file_id: str) -> None:
        await self._call("delete_file", owner, file_id)

    async def read(self, file_id: str, offset: int) -> bytes:
        piece: bytes = await self._call("read", file_id, offset)
        return piece

    async def create_batch(self, owner: str, batch: NewBatch) -> Batch:
        created: Batch = await self._call("create_batch", owner, batch)
        return created

    async def batch(self, owner: str, batch_id: str) -> Batch:
        found: Batch = await self._call("batch", owner, batch_id)
        return found

    async def list_batches(self, owner: str, after: str | None, limit: int) -> Listing[Batch]:
        found: Listing[Batch] = await self._call("list_batches", owner, after, limit)
        return found

    async def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        batch: Batch = await self._call("cancel_batch", owner, batch_id)
        return batch

    async def _call(self, method: str, *values: Any) -> Any:
        """Raises OverloadedError where nobody answered for a while."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await call_worker(self._bound.remote(method, *values))
            except (WorkerGoneError, TimeoutError) as error:
                if time.monotonic() >= deadline_s:
                    raise OverloadedError(
                        "Files and batches cannot be reached now. Please try again shortly.",
                        retry_after_s=5.0,
                    ) from error
            await asyncio.sleep(PAUSE_S)
