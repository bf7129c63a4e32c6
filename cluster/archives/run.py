"""One run over an archive: a loop that takes files as they are listed through the pools.

Of the files that are listed so far the longest goes first, so that none is left alone at the end.
So many are in work at a time, and what is done is written at once. Knows neither flags nor how the
Ray cluster was found.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import count, islice

from cluster.archives.archive import Archive, pairs_of
from cluster.archives.inputs import Item, opened
from cluster.archives.outputs import Outputs, Pending
from cluster.archives.progress import RunProgress, Totals
from cluster.archives.rows import error_text
from cluster.serve.bulk.engine import BulkEngine
from router.transcript import Transcript

LOOKED_AT = 256  # items at a time: whether they are done
LISTED_AHEAD = 10_000  # of those that are not, more than are in work; further ones are not listed


def look_at(items: Iterable[Item], outputs: Outputs, totals: Totals) -> Iterator[list[Pending]]:
    """What is to be done, as it is listed; all is counted in `totals`."""
    listing = iter(items)
    while some := list(islice(listing, LOOKED_AT)):
        pending = []
        for one in outputs.look(some):
            if isinstance(one, Pending):
                pending.append(one)
                totals.about_s += one.item.about_s
            elif one.error is None:
                totals.n_done += 1
            else:
                totals.n_failed += 1
                totals.failures[one.item.key] = one.error
        totals.n_pending += len(pending)
        yield pending
    totals.is_listed = True


class ArchiveRun:
    """Transcribes what is pending. Belongs to one event loop."""

    def __init__(
        self, archive: Archive, outputs: Outputs, engine: BulkEngine, progress: RunProgress
    ) -> None:
        """Raises InvalidRequestError: the application refuses the fields."""
        self._n_at_once = archive.files_at_once
        self._outputs, self._engine, self._progress = outputs, engine, progress
        self._params = engine.params(pairs_of(archive.fields), archive.task)
        self._queue: asyncio.PriorityQueue[tuple[float, int, Pending | None]]
        self._queue = asyncio.PriorityQueue(LISTED_AHEAD)
        self._numbers = count()

    async def run(self, listing: Iterator[list[Pending]]) -> None:
        """Transcribe all that `look_at` gives; what is done when this ends early is kept.

        Raises:
            OSError: the output cannot be written.
            InvalidRequestError: what was named cannot be listed any further.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._list(listing))
                for _ in range(self._n_at_once):
                    group.create_task(self._work())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _list(self, listing: Iterator[list[Pending]]) -> None:
        while (found := await asyncio.to_thread(next, listing, None)) is not None:
            for one in found:
                await self._queue.put((-one.item.about_s, next(self._numbers), one))
        self._progress.say(self._progress.totals.summary())
        for _ in range(self._n_at_once):
            await self._queue.put((math.inf, next(self._numbers), None))

    async def _work(self) -> None:
        while (pending := (await self._queue.get())[-1]) is not None:
            item, outputs = pending.item, self._outputs
            try:
                transcript = await self._transcribe(item)
            except Exception as error:
                await asyncio.to_thread(outputs.write_failure, pending, error)
                self._progress.totals.failures[item.key] = error_text(error)
                self._progress.end(item, None)
            else:
                await asyncio.to_thread(outputs.write, pending, transcript)
                self._progress.end(item, transcript.duration_s)

    async def _transcribe(self, item: Item) -> Transcript:
        """The engine is told no name: logs of workers tell no file's, and files may share one."""

        def note(done_s: float, known_s: float) -> None:
            self._progress.note(item, done_s, known_s)

        with ExitStack() as stack:
            upload = await asyncio.to_thread(stack.enter_context, opened(item))
            result = await self._engine.transcribe(upload, self._params, on_progress=note)
        return result.transcript
