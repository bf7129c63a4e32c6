"""Takes open batches from state to state, and runs their lines side by side.

One task looks at all open batches whenever something may have changed, and begins what is due: a
check of an input, lines, the writing of result files. All of these are tasks of their own. What is
true is in the database; after a restart the first look finds where each batch was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from cluster.errors import InsufficientStorageError
from cluster.metrics import Recorder
from router.batches.batch_table import OpenBatch
from router.batches.blobs import Blobs
from router.batches.database import DatabaseThread
from router.batches.interface import InputError, StoredFile, new_id
from router.batches.line_table import Claim, Outcome
from router.batches.line_work import LineWork
from router.batches.lines import CheckedInput, Models, check_input
from router.batches.results import file_lines
from router.batches.tables import Tables

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # longest time between two looks
ROOM_S = 5.0  # between two looks for room on a full disk
MAX_CHECKS = 3  # of an input, by owners that died or failed with it; then its batch fails
NOT_CHECKED = InputError(
    "input_not_checked", f"The server failed {MAX_CHECKS} times while it checked the input file."
)


class BatchRunner:
    """Runs all batches of an owner. Used by one event loop."""

    def __init__(
        self,
        tables: Tables,
        thread: DatabaseThread,
        blobs: Blobs,
        work: LineWork,
        models: Models,
        *,
        concurrency: int,
        max_lines: int,
        retention_s: int,
        recorder: Recorder,
        on_end: Callable[[], None],
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._recorder = recorder
        self._on_end = on_end  # a batch has ended
        self._tables = tables
        self._thread = thread
        self._blobs = blobs
        self._work = work
        self._models = models
        self._concurrency = concurrency
        self._max_lines = max_lines
        self._retention_s = retention_s
        self._unix_time = unix_time
        self._changed = asyncio.Event()
        self._lines: dict[asyncio.Task[None], Claim] = {}
        self._steps: dict[str, asyncio.Task[None]] = {}  # of batches: a check, or result files
        self._looking: asyncio.Task[None] | None = None
        self.paused: str | None = None  # why no line is begun
        self.n_open = 0  # batches, at the last look
        self.n_unfinished = 0  # lines of those in progress, at the last look

    @property
    def n_running(self) -> int:
        """Lines that are being run."""
        return len(self._lines)

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look_always())

    def look(self) -> None:
        """Call when something has changed."""
        self._changed.set()

    def healthy(self) -> bool:
        return self._looking is not None and not self._looking.done()

    async def close(self) -> None:
        """End all work; lines that run are given back."""
        tasks = [*self._lines, *self._steps.values()]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_always(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._look()
                self._find_room()
            except InsufficientStorageError as error:
                self._pause(error)
            except Exception:
                logger.exception("looking after the batches failed")
                await asyncio.sleep(LOOK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def _look(self) -> None:
        """Begin what is due."""
        now = self._unix_time()
        batches = await self._thread.call(self._tables.batches.open)
        self.n_open = len(batches)
        self.n_unfinished = sum(one.unfinished for one in batches if one.status == "in_progress")
        for batch in batches:
            if batch.id in self._steps:
                continue
            if batch.ends_as is not None:
                await self._stop_lines(batch)
                self._begin_step(batch, self._finish(batch))
            elif now >= batch.expires_at:
                await self._stop_lines(batch)
                await self._thread.call(self._tables.batches.wind_up, batch.id, "expired", int(now))
                self.look()
            elif batch.status == "validating":
                self._begin_step(batch, self._check(batch))
        running = [batch for batch in batches if batch.status == "in_progress"]
        if self.paused is None:
            await self._begin_lines(running)
        await self._wind_up_done(running)

    def _begin_step(self, batch: OpenBatch, step: Coroutine[Any, Any, None]) -> None:
        async def work() -> None:
            try:
                await step
            except InsufficientStorageError as error:
                self._pause(error)
                await asyncio.sleep(ROOM_S)
            except Exception:
                logger.exception("batch %s cannot go on", batch.id)
                await asyncio.sleep(LOOK_S)
            finally:
                self._steps.pop(batch.id, None)
                self.look()

        self._steps[batch.id] = asyncio.create_task(work())

    async def _check(self, batch: OpenBatch) -> None:
        """Check a batch's input, in at most `MAX_CHECKS` tries, whoever makes them."""
        batches = self._tables.batches
        n_begun = await self._thread.call(batches.begin_check, batch.id)
        try:
            found = CheckedInput(errors=[NOT_CHECKED])
            if n_begun <= MAX_CHECKS:
                found = await self._read_input(batch)
            await self._note_checked(batch, found)
        except InsufficientStorageError:  # which is no fault of the input's
            await self._store(batches.release_check, batch.id)
            raise
        except asyncio.CancelledError:
            await asyncio.shield(self._thread.call(batches.release_check, batch.id))
            raise

    async def _read_input(self, batch: OpenBatch) -> CheckedInput:
        with self._blobs.reading(batch.input_file_id) as path:
            return await asyncio.to_thread(
                check_input, path, batch.endpoint, self._models, self._max_lines
            )

    async def _note_checked(self, batch: OpenBatch, found: CheckedInput) -> None:
        now = int(self._unix_time())
        if found.errors:
            await self._thread.call(self._tables.batches.refuse, batch.id, found.errors, now)
            self._recorder.add("splitscribe_batches_total", status="failed")
            self._on_end()
            logger.info("batch %s failed: %s", batch.id, found.errors[0].code)
            return
        await self._thread.call(self._tables.lines.begin, batch.id, found.lines, found.model, now)
        logger.info("batch %s has %d lines", batch.id, len(found.lines))

    async def _begin_lines(self, batches: list[OpenBatch]) -> None:
        """Claim lines while there is room for them: first of the keys that have the fewest."""
        self._blobs.check_room()
        while len(self._lines) < self._concurrency:
            of_owner = Counter(claim.owner for claim in self._lines.values())
            of_batch = Counter(claim.batch_id for claim in self._lines.values())
            in_turn = sorted(batches, key=lambda one: (of_owner[one.owner], of_batch[one.id]))
            claim = await self._thread.call(
                self._tables.lines.claim, [batch.id for batch in in_turn]
            )
            if claim is None:
                return
            self._lines[asyncio.create_task(self._run_line(claim))] = claim

    async def _run_line(self, claim: Claim) -> None:
        try:
            outcome, result = await self._work.run(claim)
            await self._settle(claim, outcome, result)
            self._recorder.add("splitscribe_batch_lines_total", outcome=outcome)
        except InsufficientStorageError as error:
            self._pause(error)
            await asyncio.sleep(ROOM_S)
            await self._give_back(claim)
        except asyncio.CancelledError:
            await asyncio.shield(self._thread.call(self._tables.lines.release, claim))
            raise
        except Exception:  # of the database
            logger.exception("line %d of %s cannot go on", claim.number, claim.batch_id)
            await asyncio.sleep(LOOK_S)
            await self._store(self._tables.lines.release, claim, True)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._lines.pop(task, None)
            self.look()

    async def _settle(self, claim: Claim, outcome: Outcome, result: str) -> None:
        await self._store(self._tables.lines.settle, claim, outcome, result)

    async def _give_back(self, claim: Claim) -> None:
        """Let the line be claimed again; else nobody would before the next owner."""
        await self._store(self._tables.lines.release, claim)

    async def _store(self, work: Callable[..., object], *values: object) -> None:
        """Change the database as soon as there is room for it."""
        while True:
            try:
                await self._thread.call(work, *values)
                return
            except InsufficientStorageError as error:
                self._pause(error)
                await asyncio.sleep(ROOM_S)

    async def _stop_lines(self, batch: OpenBatch) -> None:
        tasks = [task for task, claim in self._lines.items() if claim.batch_id == batch.id]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wind_up_done(self, batches: list[OpenBatch]) -> None:
        for batch in batches:
            if batch.unfinished == 0 and batch.id not in self._steps:
                now = int(self._unix_time())
                await self._thread.call(self._tables.batches.wind_up, batch.id, "completed", now)
                self.look()

    async def _finish(self, batch: OpenBatch) -> None:
        """Write the files of a batch whose lines have ended."""
        await self._thread.call(self._tables.lines.give_up, batch.id)
        output = await self._write(batch, "completed")
        errors = await self._write(batch, "failed")
        now = int(self._unix_time())
        await self._thread.call(self._tables.batches.end, batch, output, errors, now)
        await self._thread.call(self._tables.database.give_space_back)
        self._recorder.add("splitscribe_batches_total", status=str(batch.ends_as))
        self._on_end()
        logger.info("batch %s is %s", batch.id, batch.ends_as)

    async def _write(self, batch: OpenBatch, outcome: Outcome) -> StoredFile | None:
        """A file of all results of one kind; None where there is none."""
        if not await self._thread.call(self._tables.lines.results, batch.id, outcome, 0):
            return None
        assert batch.ends_as is not None
        file_id, now = new_id("file-"), int(self._unix_time())
        lines = file_lines(batch.id, batch.ends_as, self._results(batch.id, outcome))
        size_bytes = await asyncio.to_thread(self._blobs.write, file_id, lines)
        kept_s = batch.output_expires_after_s or self._retention_s
        kind = "output" if outcome == "completed" else "error"
        return StoredFile(
            file_id,
            "batch_output",
            f"{batch.id}_{kind}.jsonl",
            size_bytes,
            now,
            now + kept_s if kept_s else None,
        )

    def _results(self, batch_id: str, outcome: Outcome) -> Iterator[tuple[int, str, str | None]]:
        """All rows, read page by page. Called in a thread."""
        after = 0
        while page := self._thread.call_blocking(
            self._tables.lines.results, batch_id, outcome, after
        ):
            yield from page
            after = page[-1][0]

    def _pause(self, error: InsufficientStorageError) -> None:
        if self.paused is None:
            logger.warning("batches pause: %s", error.message)
        self.paused = error.message

    def _find_room(self) -> None:
        """End a pause where there is room again. Raises InsufficientStorageError."""
        self._blobs.check_room()
        if self.paused is not None:
            logger.info("batches go on")
            self.paused = None
            self.look()
