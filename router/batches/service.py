"""Implements the files and batches API in the one process that owns their folder.

Routers call it through `cluster.serve.bulk`. It knows neither HTTP nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress

from cluster.common.errors import ConfigurationError, InsufficientStorageError
from cluster.common.metrics import BATCH_METRICS, Recorder, silent_recorder
from cluster.common.settings import BatchSettings
from router.api.batch_bodies import (
    Batch,
    BatchPage,
    CreateBatchRequest,
    FileObject,
    FilePage,
    UploadFields,
    expiry_s,
)
from router.batches import uploads
from router.batches.blobs import ABANDONED_S, FOLDERS, Blobs
from router.batches.database import FILE_NAME, Database, check_local
from router.batches.hosts import HostRules, Resolve, resolve
from router.batches.line_work import BulkTranscriber, LineWork
from router.batches.outbound import Downloads, Webhooks
from router.batches.owned import Owned
from router.batches.runner import BatchRunner
from router.batches.store import Order, Store, no_such_file
from router.batches.work_queue import Usage, WorkQueue

logger = logging.getLogger(__name__)

ASKED = (  # the methods that routers call
    *("begin_upload", "append", "finish_upload", "abort_upload"),
    *("file", "list_files", "delete_file", "read"),
    *("create_batch", "batch", "list_batches", "cancel_batch", "usage"),
)
PIECE_BYTES = 1024 * 1024  # largest piece of an upload or a download in one call
OWNED_S = 60.0  # longest wait for the previous owner to exit
CHORES_S = 5.0
CLEANING_S = 60.0


class BatchService:
    """`owner` is a digest of the API key, or empty without keys. Objects of other keys are hidden.

    The caller makes the ids, so that it can repeat a call that got no answer. The methods in
    `ASKED` raise NotFoundError, InsufficientStorageError if the disk or a quota is full, and
    OverloadedError if the owner's process cannot be reached.
    """

    def __init__(self, owned: Owned, engine: BulkTranscriber, resolve: Resolve) -> None:
        self._owned = owned
        self._store = owned.store
        self._call = owned.store.database.call
        self._look_at_once = asyncio.Event()
        settings = owned.settings
        networks = settings.private_networks
        self._downloads = Downloads(
            HostRules(settings.allowed_hosts, networks, resolve), owned.blobs, settings
        )
        self._webhooks = Webhooks(owned, HostRules(settings.webhook_hosts, networks, resolve))
        work = LineWork(owned, engine, self._downloads)
        self._runner = BatchRunner(owned, work, engine.models, self._look_at_once.set)
        self._chores = asyncio.create_task(self._do_chores())

    def healthy(self) -> bool:
        return self._runner.healthy() and not self._chores.done()

    async def close(self) -> None:
        self._chores.cancel()
        await asyncio.gather(self._chores, return_exceptions=True)
        await self._runner.close()
        await self._webhooks.close()
        await self._downloads.close()
        await asyncio.to_thread(self._store.database.close)

    # ---- called by routers (`ASKED`)

    async def begin_upload(self, owner: str, upload_id: str, expected_bytes: int) -> None:
        """expected_bytes: 0 if the client does not announce the size."""
        self._owned.blobs.check_room(expected_bytes)
        await self._reserve(owner, upload_id, expected_bytes)

    async def append(self, owner: str, upload_id: str, offset: int, piece: bytes) -> None:
        """Write a piece of at most `PIECE_BYTES`. The call may be repeated."""
        await self._reserve(owner, upload_id, offset + len(piece))
        await asyncio.to_thread(self._owned.blobs.append, upload_id, offset, piece)

    async def finish_upload(
        self, owner: str, upload_id: str, filename: str, size_bytes: int, fields: UploadFields
    ) -> FileObject:
        await self._reserve(owner, upload_id, size_bytes)
        await asyncio.to_thread(self._owned.blobs.keep, upload_id, size_bytes)
        kept_s = expiry_s(fields.expires_after) or self._owned.settings.retention_s
        file = self._store.new_file(upload_id, fields.purpose, filename, size_bytes, kept_s)
        try:
            return await self._call(self._store.add_file, owner, file)
        except InsufficientStorageError:
            await asyncio.to_thread(self._owned.blobs.remove, upload_id)
            raise

    async def abort_upload(self, upload_id: str) -> None:
        await asyncio.to_thread(self._owned.blobs.abort, upload_id)
        await self._call(uploads.release, self._store, upload_id)

    async def file(self, owner: str, file_id: str) -> FileObject:
        return await self._call(self._store.file, owner, file_id)

    async def list_files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> FilePage:
        return await self._call(self._store.files, owner, after, limit, order, purpose)

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Raises ConflictError if the file is the input of an open batch."""
        await self._call(self._store.delete_file, owner, file_id)
        await asyncio.to_thread(self._owned.blobs.remove, file_id)

    async def read(self, file_id: str, offset: int) -> bytes:
        """Return at most `PIECE_BYTES`, and no bytes at the end of the file."""
        try:
            return await asyncio.to_thread(self._owned.blobs.read, file_id, offset, PIECE_BYTES)
        except FileNotFoundError:
            raise no_such_file(file_id) from None

    async def create_batch(self, owner: str, batch_id: str, asked: CreateBatchRequest) -> Batch:
        """Raises RateLimitError if the key or the input file has too many open batches."""
        if asked.webhook_url is not None:
            await self._webhooks.check(asked.webhook_url)
        most = self._owned.settings.max_batches_per_key
        created = await self._call(self._store.add_batch, owner, batch_id, asked, most)
        self._runner.look()
        return self._shown(created)

    async def batch(self, owner: str, batch_id: str) -> Batch:
        return self._shown(await self._call(self._store.batch, owner, batch_id))

    async def list_batches(self, owner: str, after: str | None, limit: int) -> BatchPage:
        found = await self._call(self._store.batches, owner, after, limit)
        return found.model_copy(update={"data": [self._shown(batch) for batch in found.data]})

    async def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        """Raises ConflictError if the batch has ended otherwise, or is finalizing."""
        batch = await self._call(self._store.cancel, owner, batch_id)
        self._runner.look()
        return batch

    async def usage(self, owner: str) -> list[Usage]:
        return await self._call(self._owned.queue.usage, owner)

    async def _reserve(self, owner: str, upload_id: str, n_bytes: int) -> None:
        if most_bytes := self._owned.settings.quota_bytes:
            await self._call(uploads.reserve, self._store, owner, upload_id, n_bytes, most_bytes)

    def _shown(self, batch: Batch) -> Batch:
        waits = batch.status in ("in_progress", "finalizing")
        return batch.model_copy(update={"paused": self._runner.paused}) if waits else batch

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
                logger.exception("the clean-up of files and webhooks failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(CHORES_S):
                    await self._look_at_once.wait()

    async def clean(self) -> None:
        store, blobs = self._store, self._owned.blobs
        await asyncio.to_thread(blobs.sweep, await self._call(store.expire_files))
        await self._call(uploads.forget_abandoned, store, ABANDONED_S)
        await self._call(self._owned.queue.forget_usage)
        if retention_s := self._owned.settings.retention_s:
            await self._call(store.forget_batches, retention_s)

    async def _report(self) -> None:
        n_files, n_bytes = await self._call(self._store.file_totals)
        record, running = self._owned.recorder.set, self._runner.n_running
        record("splitscribe_batches_open", self._runner.n_open)
        record("splitscribe_batches_paused", float(self._runner.paused is not None))
        record("splitscribe_batch_lines_waiting", max(0, self._runner.n_unfinished - running))
        record("splitscribe_batch_lines_running", running)
        record("splitscribe_batch_files", n_files)
        record("splitscribe_batch_files_bytes", n_bytes)
        record("splitscribe_batch_disk_free_bytes", self._owned.blobs.free_bytes())


async def open_service(
    settings: BatchSettings,
    engine: BulkTranscriber,
    recorder: Recorder | None = None,
    *,
    resolve: Resolve = resolve,
    unix_time: Callable[[], float] = time.time,
    owned_s: float = OWNED_S,
) -> BatchService:
    """Raises ConfigurationError if the folder cannot be used or is still owned after `owned_s`."""
    assert settings.folder is not None
    folder = settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_local(folder.resolve())
        names = (one.name for one in folder.iterdir())
        if all(name in FOLDERS or name.startswith(FILE_NAME) for name in names):
            with suppress(PermissionError):  # a volume that belongs to another user
                folder.chmod(0o700)
        database = await asyncio.to_thread(Database, folder, owned_s)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"batches.folder {folder} cannot be used: {error}") from error
    try:
        store, queue = Store(database, unix_time), WorkQueue(database, unix_time)
        await database.call(queue.take_over)
        blobs = await asyncio.to_thread(Blobs, folder, settings.min_free_bytes)
        recorder = recorder or silent_recorder(BATCH_METRICS)
        return BatchService(Owned(settings, blobs, store, queue, recorder), engine, resolve)
    except BaseException:
        database.close()
        raise
