"""What the parts of an owner share: its folder, its database, its settings, its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.common.metrics import Recorder
from cluster.common.settings import BatchSettings
from router.api.batch_bodies import FileObject
from router.batches.blobs import Blobs
from router.batches.database import Database, DatabaseThread
from router.batches.store import Store
from router.batches.work_queue import WorkQueue

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Owned:
    """database, store, queue: used in `thread` alone, so through `call`."""

    settings: BatchSettings
    blobs: Blobs
    database: Database
    store: Store
    queue: WorkQueue
    thread: DatabaseThread
    recorder: Recorder
    unix_time: Callable[[], float]

    @property
    def now(self) -> int:
        return int(self.unix_time())

    async def call(self, work: Callable[..., Result], *values: object) -> Result:
        return await self.thread.call(work, *values)

    def new_file(
        self, file_id: str, purpose: str, filename: str, size_bytes: int, kept_s: int | None
    ) -> FileObject:
        """kept_s: None: as the settings say."""
        now, kept_s = self.now, kept_s or self.settings.retention_s
        return FileObject(
            id=file_id,
            bytes=size_bytes,
            created_at=now,
            expires_at=now + kept_s if kept_s else None,
            filename=filename,
            purpose=purpose,
        )
