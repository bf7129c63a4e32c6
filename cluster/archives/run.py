"""One run over an archive: transcribe the longest listed file first while listing goes on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count, islice

from rich.console import Console
from rich.status import Status

from cluster.archives.inputs import Item
from cluster.archives.outputs import Archive, Outputs, Pending, Result, error_text, pairs_of
from cluster.archives.places import Place
from cluster.common.logs import counted
from cluster.serve.bulk.engine import BulkEngine
from router.transcript import Transcript

LOOKED_AT = 256  # items whose sidecars are read together
LISTED_AHEAD = 10_000  # pending items in the queue; listing waits beyond them
LINE_S = 30.0  # between lines of progress where there is no terminal


def look_at(
    items: Iterable[Item], outputs: Outputs, progress: RunProgress
) -> Iterator[list[Pending]]:
    """Yield the items to transcribe in groups, and count all items in `progress`."""
    listing = iter(items)
    while some := list(islice(listing, LOOKED_AT)):
        pending = []
        for item, one in zip(some, outputs.look(some), strict=True):
            if isinstance(one, Pending):
                pending.append(one)
                progress.about_s += item.about_s
            elif one is None:
                progress.n_before += 1
            else:
                progress.n_failed_before += 1
                progress.failures[item.path] = one
        progress.n_pending += len(pending)
        yield pending
    progress.is_listed = True


async def run_archive(
    archive: Archive,
    outputs: Outputs,
    engine: BulkEngine,
    progress: RunProgress,
    listing: Iterator[list[Pending]],
) -> None:
    """Transcribe all that `look_at` yields; outputs written before an early end are kept.

    Raises OSError: the output cannot be written. InvalidRequestError: the application refuses the
    fields, or listing fails.
    """
    params = engine.params(pairs_of(archive.fields), archive.task)
    queue = asyncio.PriorityQueue[tuple[float, int, Pending | None]](LISTED_AHEAD)
    numbers = count()

    async def list_all() -> None:
        while (found := await asyncio.to_thread(next, listing, None)) is not None:
            for one in found:
                await queue.put((-one.item.about_s, next(numbers), one))
        progress.say(progress.summary())
        for _ in range(archive.files_at_once):
            await queue.put((math.inf, next(numbers), None))

    async def work() -> None:
        while (pending := (await queue.get())[-1]) is not None:
            try:
                result: Result = await transcribe(pending.item)
            except Exception as error:
                result = error
            await asyncio.to_thread(outputs.write, pending, result)
            progress.end(pending.item, result)

    async def transcribe(item: Item) -> Transcript:
        """Pass no file name to the engine: logs of workers must not hold one."""
        with ExitStack() as stack:
            file = Place.of(item.path).as_local_file()
            upload = await asyncio.to_thread(stack.enter_context, file)
            result = await engine.transcribe(
                upload, params, on_progress=lambda done_s, _: progress.note(item, done_s)
            )
        return result.transcript

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(list_all())
            for _ in range(archive.files_at_once):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


class RunProgress:
    """Counts of an archive's items, final once `is_listed`, and the progress of a run.

    n_before, n_failed_before: of earlier runs. failures: path -> reason, over all runs. about_s:
    seconds of audio of pending items, estimated by size.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._started_s = self._told_s = now()
        self.status = Status("", console=console)
        self._guessed_s = 0.0  # estimates by size of the files that are done
        self._at_work: dict[str, float] = {}  # path -> seconds done
        self.n_before = self.n_failed_before = self.n_pending = self.n_done = 0
        self.about_s = self.done_s = 0.0
        self.is_listed = False
        self.failures: dict[str, str] = {}

    def say(self, line: str) -> None:
        self._console.print(f"splitscribe: {line}", markup=False)

    @property
    def n_items(self) -> int:
        return self.n_before + self.n_failed_before + self.n_pending

    def summary(self) -> str:
        parts = [counted(self.n_items, "file")]
        if self.n_before:
            parts.append(f"{self.n_before} done")
        if self.n_failed_before:
            parts.append(f"{self.n_failed_before} failed before (--retry-failed tries them again)")
        about = hours(self.about_s)
        parts.append(f"{self.n_pending} to do, about {about} of audio by their sizes")
        return ", ".join(parts)

    def note(self, item: Item, done_s: float) -> None:
        self._at_work[item.path] = done_s
        self._tell()

    def end(self, item: Item, result: Result) -> None:
        self._at_work.pop(item.path, None)
        self.n_done += 1
        if isinstance(result, Exception):
            self.failures[item.path] = error_text(result)
            self.about_s -= item.about_s
        else:
            self.done_s += result.duration_s
            self._guessed_s += item.about_s
        self._tell()

    def _tell(self) -> None:
        if self._console.is_terminal:
            self.status.update(self.line())
        elif self._now() - self._told_s >= LINE_S:
            self._told_s = self._now()
            self.say(self.line())

    @property
    def left_s(self) -> float:
        """Seconds of audio to go: estimates by size, scaled by how they compared so far."""
        right = self.done_s / self._guessed_s if self._guessed_s else 1.0
        return max(0.0, (self.about_s - self._guessed_s) * right - sum(self._at_work.values()))

    @property
    def _heard_s(self) -> float:
        return self.done_s + sum(self._at_work.values())

    @property
    def speed(self) -> float:
        return self._heard_s / max(1e-9, self._now() - self._started_s)

    def line(self) -> str:
        left_s, heard_s, speed = self.left_s, self._heard_s, self.speed
        about = "" if self.is_listed and self.n_done == self.n_pending else "about "
        n_files = counted(self.n_pending, "file" if self.is_listed else "or more file")
        words = [
            f"{self.n_done} of {n_files}",
            f"{hours(heard_s)} of {about}{hours(heard_s + left_s)} of audio",
        ]
        if speed:
            words.append(f"{speed:.1f} hours per hour")
            words.append(f"{hours(left_s / speed)} to go")
        if n_failed := len(self.failures) - self.n_failed_before:
            words.append(f"{n_failed} failed")
        return ", ".join(words)


def hours(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
