"""Moves open batches from state to state, and runs their lines concurrently.

One task looks at all open batches whenever something may have changed, and starts a task for each
step that is due. All state is in the database, so the first look after a restart resumes the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from cluster.common.errors import InsufficientStorageError
from router.api.batch_bodies import BatchError, FileObject, Status
from router.batches.line_work import LineWork
from router.batches.lines import CheckedInput, Models, check_input, file_lines
from router.batches.owned import Owned
from router.batches.store import OpenBatch
from router.batches.work_queue import Claim, Outcome

logger = logging.getLogger(__name__)
GiveBack = Callable[[bool], None]

LOOK_S = 5.0  # longest time between two looks
ROOM_S = 5.0  # between two checks whether a full disk has room again
MAX_CHECKS = 3  # failed checks of an input file, in all owners, after which its batch fails
NOT_CHECKED = BatchError(
    code="input_not_checked",
    message=f"The server failed {MAX_CHECKS} times while it checked the input file.",
)


class BatchRunner:
    def __init__(
        self, owned: Owned, work: LineWork, models: Models, on_end: Callable[[], None]
    ) -> None:
        self._owned = owned
        self._call = owned.store.database.call
        self._work = work
        self._models = models
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._lines: dict[asyncio.Task[None], Claim] = {}
        self._steps: dict[str, asyncio.Task[None]] = {}  # by batch id: a check, or the end
        self._checking: asyncio.Task[None] | None = None  # the last check
        self._checked: dict[str, int] = {}  # by owner: a sequence number of its last check
        self._looking = asyncio.create_task(self._look_always())
        self.paused: str | None = None  # why no line is started
        self.n_open = 0  # batches, at the last look
        self.n_unfinished = 0  # lines of those in progress, at the last look

    @property
    def n_running(self) -> int:
        return len(self._lines)

    def look(self) -> None:
        self._changed.set()

    def healthy(self) -> bool:
        return not self._looking.done()

    async def close(self) -> None:
        await _cancel([self._looking, *self._lines, *self._steps.values()])

    async def _look_always(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._look()
                self._find_room()
            except InsufficientStorageError as error:
                self._pause(error)
            except Exception:
                logger.exception("a round over the batches failed")
                await asyncio.sleep(LOOK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def _look(self) -> None:
        in_step = set(self._steps)  # read first: these may end while the rows are read
        batches = await self._call(self._owned.store.open_batches)
        running = [batch for batch in batches if batch.status == "in_progress"]
        self.n_open = len(batches)
        self.n_unfinished = sum(batch.unfinished for batch in running)
        unchecked = []
        for batch in batches:
            if batch.id in in_step:
                continue
            if batch.ends_as is not None:
                await self._stop_lines(batch)
                self._begin_step(batch, self._finish(batch))
            elif self._owned.store.now >= batch.expires_at:
                await self._stop_lines(batch)
                await self._wind_up(batch, "expired")
            elif batch.status == "validating":
                unchecked.append(batch)
        await self._begin_check(unchecked)
        if self.paused is None:
            await self._begin_lines(running)
        for batch in running:
            if batch.unfinished == 0 and batch.id not in self._steps:
                await self._wind_up(batch, "completed")

    def _begin_step(
        self, batch: OpenBatch, step: Coroutine[Any, Any, None], give_back: GiveBack | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._do(f"batch {batch.id}", step, give_back))
        self._steps[batch.id] = task
        task.add_done_callback(lambda _: self._steps.pop(batch.id))
        return task

    async def _do(
        self, what: str, step: Coroutine[Any, Any, None], give_back: GiveBack | None
    ) -> None:
        """Run a step. If it fails, wait and call `give_back` with whether the try counts."""
        try:
            await step
        except InsufficientStorageError as error:  # not the step's fault
            self._pause(error)
            await asyncio.sleep(ROOM_S)
            await self._store(give_back, False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # The try counts if something inside was cancelled, and not this task.
            if give_back is not None:
                await self._call(give_back, task is None or not task.cancelling())
            raise
        except Exception:
            logger.exception("%s cannot go on", what)
            await asyncio.sleep(LOOK_S)
            await self._store(give_back, True)
        finally:
            self.look()

    async def _begin_check(self, batches: list[OpenBatch]) -> None:
        """Start one check at a time, by keys in turn, since a check takes memory and the GIL."""
        if not batches or not (self._checking is None or self._checking.done()):
            return
        batch = min(batches, key=lambda one: self._checked.get(one.owner, 0))
        self._checked[batch.owner] = 1 + max(self._checked.values(), default=0)
        n_begun = await self._call(self._owned.store.count_check, batch.id)
        give_back = partial(self._owned.store.release_check, batch.id)
        self._checking = self._begin_step(batch, self._check(batch, n_begun), give_back)

    async def _check(self, batch: OpenBatch, n_begun: int) -> None:
        store = self._owned.store
        found = CheckedInput(errors=[NOT_CHECKED])
        if n_begun <= MAX_CHECKS:  # the input file of an open batch cannot be deleted
            found = await asyncio.to_thread(
                check_input,
                self._owned.blobs.path(batch.input_file_id),
                batch.endpoint,
                self._models,
                self._owned.settings.max_lines,
            )
        if found.errors:
            if await self._call(store.refuse, batch.id, found.errors):
                self._note_end(batch, "failed")
        else:
            await self._call(store.begin, batch.id, found.lines, found.model)
            logger.info("batch %s has %d lines", batch.id, len(found.lines))

    async def _begin_lines(self, batches: list[OpenBatch]) -> None:
        """Claim lines up to the concurrency limit, first for the keys with the fewest running."""
        self._owned.blobs.check_room()
        while len(self._lines) < self._owned.settings.concurrency:
            of_owner = Counter(claim.batch.owner for claim in self._lines.values())
            of_batch = Counter(claim.batch.id for claim in self._lines.values())
            in_turn = sorted(batches, key=lambda one: (of_owner[one.owner], of_batch[one.id]))
            claim = await self._call(self._owned.queue.claim, in_turn)
            if claim is None:
                return
            what = f"line {claim.number} of {claim.batch.id}"
            give_back = partial(self._owned.queue.release, claim)
            task = asyncio.create_task(self._do(what, self._run_line(claim), give_back))
            self._lines[task] = claim
            task.add_done_callback(self._lines.pop)

    async def _run_line(self, claim: Claim) -> None:
        outcome, result, audio_s = await self._work.run(claim)
        await self._store(self._owned.queue.settle, claim, outcome, result, audio_s)
        self._owned.recorder.add("splitscribe_batch_lines_total", outcome=outcome)

    async def _store(self, work: Callable[..., object] | None, *values: Any) -> None:
        while work is not None:
            try:
                await self._call(work, *values)
                return
            except InsufficientStorageError as error:
                self._pause(error)
                await asyncio.sleep(ROOM_S)

    async def _stop_lines(self, batch: OpenBatch) -> None:
        await _cancel([task for task, claim in self._lines.items() if claim.batch.id == batch.id])

    async def _wind_up(self, batch: OpenBatch, ends_as: Literal["completed", "expired"]) -> None:
        await self._call(self._owned.store.wind_up, batch.id, ends_as)
        self.look()

    async def _finish(self, batch: OpenBatch) -> None:
        assert batch.ends_as is not None
        store = self._owned.store
        outcomes = await self._call(self._owned.queue.give_up, batch.id)
        output = await self._write(batch, "completed") if "completed" in outcomes else None
        errors = await self._write(batch, "failed") if "failed" in outcomes else None
        await self._call(store.end, batch.id, output, errors)
        await self._call(store.database.give_space_back)
        self._note_end(batch, batch.ends_as)

    async def _write(self, batch: OpenBatch, outcome: Outcome) -> FileObject:
        """Write the file of all results of one kind. It replaces the file of an earlier try."""
        kind = "output" if outcome == "completed" else "error"
        file_id = f"{batch.id.replace('batch_', 'file-')}-{kind}"
        lines = file_lines(batch, self._owned.queue.results(batch.id, outcome))
        size_bytes = await asyncio.to_thread(self._owned.blobs.write, file_id, lines)
        name = f"{batch.id}_{kind}.jsonl"
        kept_s = batch.output_expires_after_s or self._owned.settings.retention_s
        return self._owned.store.new_file(file_id, "batch_output", name, size_bytes, kept_s)

    def _note_end(self, batch: OpenBatch, status: Status) -> None:
        self._owned.recorder.add("splitscribe_batches_total", status=status)
        self._on_end()
        logger.info("batch %s is %s", batch.id, status)

    def _pause(self, error: InsufficientStorageError) -> None:
        if self.paused is None:
            logger.warning("batches pause: %s", error.message)
        self.paused = error.message

    def _find_room(self) -> None:
        """End a pause if the disk has room again. Raises InsufficientStorageError."""
        self._owned.blobs.check_room()
        if self.paused is not None:
            logger.info("batches go on")
            self.paused = None
            self.look()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
