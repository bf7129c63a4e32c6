"""Files and batches, in the one process that owns their folder; implements `BatchBackend`.

It opens the folder, which nobody else may have open, answers what routers ask, and keeps the
runner, the webhooks and the housekeeping going. Knows neither HTTP nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from cluster.clock import SYSTEM_CLOCK, Clock
from cluster.errors import ConfigurationError, InsufficientStorageError
from cluster.metrics import BATCH_METRICS, Recorder, silent_recorder
from cluster.settings import BatchSettings
from router.batches.blobs import Blobs
from router.batches.database import DatabaseThread, check_local, exclusive
from router.batches.file_table import no_such_file
from router.batches.hosts import HostRules, Resolve, resolve
from router.batches.interface import (
    PIECE_BYTES,
    Batch,
    Listing,
    NewBatch,
    NewFile,
    Order,
    StoredFile,
)
from router.batches.line_work import BulkTranscriber, LineWork
from router.batches.lines import Models
from router.batches.outbound import Downloads
from router.batches.runner import BatchRunner
from router.batches.tables import Tables, open_tables
from router.batches.webhooks import Webhooks

logger = logging.getLogger(__name__)

OWNED_S = 60.0  # how long the owner before this one may take to end
CHORES_S = 5.0
CLEANING_S = 60.0


class BatchService:
    """All of it; made by `open_service`."""

    def __init__(
        self,
        settings: BatchSettings,
        tables: Tables,
        thread: DatabaseThread,
        blobs: Blobs,
        models: Models,
        engine: BulkTranscriber,
        recorder: Recorder,
        lock: ExitStack,
        *,
        clock: Clock = SYSTEM_CLOCK,
        resolve: Resolve = resolve,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._thread = thread
        self._blobs = blobs
        self._recorder = recorder
        self._lock = lock
        self._unix_time = unix_time
        self._look_at_once = asyncio.Event()
        networks = settings.private_networks
        self._downloads = Downloads(
            HostRules(settings.allowed_hosts, networks, resolve),
            blobs,
            max_bytes=settings.max_file_bytes,
            timeout_s=settings.fetch_timeout_s,
        )
        self._webhooks = Webhooks(
            tables.webhooks,
            thread,
            HostRules(settings.webhook_hosts, networks, resolve),
            settings.webhook_secret,
            recorder,
            unix_time,
        )
        work = LineWork(
            engine,
            tables,
            thread,
            blobs,
            self._downloads,
            max_audio_bytes=settings.max_file_bytes,
            clock=clock,
        )
        self._runner = BatchRunner(
            tables,
            thread,
            blobs,
            work,
            models,
            concurrency=settings.concurrency,
            max_lines=settings.max_lines,
            retention_s=settings.retention_s,
            recorder=recorder,
            on_end=self._look_at_once.set,
            unix_time=unix_time,
        )
        self._runner.start()
        self._chores = asyncio.create_task(self._do_chores())

    def healthy(self) -> bool:
        return self._runner.healthy() and not self._chores.done()

    async def close(self) -> None:
        """Give back what runs, and the folder."""
        self._chores.cancel()
        await asyncio.gather(self._chores, return_exceptions=True)
        await self._runner.close()
        await self._webhooks.close()
        await self._downloads.close()
        await self._thread.call(self._tables.database.close)
        await asyncio.to_thread(self._thread.close)
        self._lock.close()

    # What `BatchBackend` documents.

    async def begin_upload(self, owner: str, upload_id: str, expected_bytes: int) -> None:
        self._blobs.check_room(expected_bytes)
        await self._check_quota(owner, expected_bytes)

    async def append(self, upload_id: str, offset: int, piece: bytes) -> None:
        await asyncio.to_thread(self._blobs.append, upload_id, offset, piece)

    async def finish_upload(self, owner: str, file: NewFile) -> StoredFile:
        await self._check_quota(owner, file.size_bytes, but=file.id)
        await asyncio.to_thread(self._blobs.keep, file.id, file.size_bytes)
        now = self._now()
        kept_s = file.expires_after_s or self._settings.retention_s
        stored = StoredFile(
            file.id,
            file.purpose,
            file.filename,
            file.size_bytes,
            now,
            now + kept_s if kept_s else None,
        )
        return await self._thread.call(self._tables.files.add, owner, stored)

    async def abort_upload(self, upload_id: str) -> None:
        await asyncio.to_thread(self._blobs.abort, upload_id)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        return await self._thread.call(self._tables.files.get, owner, file_id, self._now())

    async def list_files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> Listing[StoredFile]:
        return await self._thread.call(
            self._tables.files.page, owner, after, limit, order, purpose, self._now()
        )

    async def delete_file(self, owner: str, file_id: str) -> None:
        await self._thread.call(self._tables.files.delete, owner, file_id, self._now())

    async def read(self, file_id: str, offset: int) -> bytes:
        try:
            return await asyncio.to_thread(self._blobs.read, file_id, offset, PIECE_BYTES)
        except FileNotFoundError:
            raise no_such_file(file_id) from None

    async def create_batch(self, owner: str, batch: NewBatch) -> Batch:
        if batch.webhook_url is not None:
            await self._webhooks.check(batch.webhook_url)
        created = await self._thread.call(
            self._tables.batches.add,
            owner,
            batch,
            self._now(),
            self._settings.max_batches_per_key,
        )
        self._runner.look()
        return self._shown(created)

    async def batch(self, owner: str, batch_id: str) -> Batch:
        return self._shown(await self._thread.call(self._tables.batches.get, owner, batch_id))

    async def list_batches(self, owner: str, after: str | None, limit: int) -> Listing[Batch]:
        found = await self._thread.call(self._tables.batches.page, owner, after, limit)
        return Listing(tuple(map(self._shown, found.items)), found.has_more)

    async def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        batch = await self._thread.call(self._tables.batches.cancel, owner, batch_id, self._now())
        self._runner.look()
        return batch

    def _shown(self, batch: Batch) -> Batch:
        """With why it waits, where it does."""
        waits = self._runner.paused is not None and batch.status in ("in_progress", "finalizing")
        return replace(batch, paused=self._runner.paused) if waits else batch

    def _now(self) -> int:
        return int(self._unix_time())

    async def _check_quota(self, owner: str, more_bytes: int, but: str = "") -> None:
        """Raises InsufficientStorageError where a key's files would be more than it may have.

        but: a file that is not counted, since it may be there already.
        """
        quota = self._settings.quota_bytes
        if not quota:
            return
        used = await self._thread.call(self._tables.files.used_bytes, owner, but)
        if used + more_bytes > quota:
            raise InsufficientStorageError(
                f"The files of this API key take {used} bytes, of at most {quota}; this one with "
                f"{more_bytes} bytes does not fit. Delete files that are not needed.",
                code="storage_quota_exceeded",
            )

    async def _do_chores(self) -> None:
        cleaned_s = -CLEANING_S
        while True:
            self._look_at_once.clear()
            try:
                await self._webhooks.deliver_due()
                if time.monotonic() - cleaned_s >= CLEANING_S:
                    cleaned_s = time.monotonic()
                    await self.clean()
                await self._report()
            except Exception:
                logger.exception("looking after files failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(CHORES_S):
                    await self._look_at_once.wait()

    async def clean(self) -> None:
        """Let go of what has expired, and of what nobody reads any more."""
        await self._thread.call(self._tables.files.expire, self._now())
        deleted = await self._thread.call(self._tables.files.deleted)
        gone = await asyncio.to_thread(self._blobs.remove, deleted)
        await self._thread.call(self._tables.files.forget, gone)
        await asyncio.to_thread(self._blobs.sweep)
        if retention_s := self._settings.retention_s:
            before = self._now() - retention_s
            await self._thread.call(self._tables.batches.forget_ended, before)

    async def _report(self) -> None:
        n_files, n_bytes = await self._thread.call(self._tables.files.totals)
        record, running = self._recorder.set, self._runner.n_running
        record("splitscribe_batches_open", self._runner.n_open)
        record("splitscribe_batches_paused", float(self._runner.paused is not None))
        record("splitscribe_batch_lines_waiting", max(0, self._runner.n_unfinished - running))
        record("splitscribe_batch_lines_running", running)
        record("splitscribe_batch_files", n_files)
        record("splitscribe_batch_files_bytes", n_bytes)
        record("splitscribe_batch_disk_free_bytes", self._blobs.free_bytes())


async def open_service(
    settings: BatchSettings,
    models: Models,
    engine: BulkTranscriber,
    recorder: Recorder | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    resolve: Resolve = resolve,
    unix_time: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    owned_s: float = OWNED_S,
) -> BatchService:
    """Own the folder of `settings`, and go on with what is there.

    Args:
        owned_s: how long to wait where another process has it.

    Raises:
        ConfigurationError: it cannot be used, or another process keeps it.
    """
    assert settings.folder is not None
    folder = settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_local(folder.resolve())
        lock = await _own(folder, owned_s)
    except OSError as error:
        raise ConfigurationError(f"batches.folder {folder} cannot be used: {error}") from error
    thread = DatabaseThread()
    try:
        tables = await thread.call(open_tables, folder)
        blobs = await asyncio.to_thread(Blobs, folder, settings.min_free_bytes, monotonic)
        known = await thread.call(tables.files.known)
        await asyncio.to_thread(blobs.sweep, known)
        return BatchService(
            settings,
            tables,
            thread,
            blobs,
            models,
            engine,
            recorder or silent_recorder(BATCH_METRICS),
            lock,
            clock=clock,
            resolve=resolve,
            unix_time=unix_time,
        )
    except BaseException:
        thread.close()
        lock.close()
        raise


async def _own(folder: Path, owned_s: float) -> ExitStack:
    deadline_s = time.monotonic() + owned_s
    while True:
        with ExitStack() as stack:
            if stack.enter_context(exclusive(folder)):
                return stack.pop_all()
        if time.monotonic() >= deadline_s:
            raise ConfigurationError(
                f"batches.folder {folder} belongs to another process that runs; give each "
                "application a folder of its own"
            )
        await asyncio.sleep(0.2)
