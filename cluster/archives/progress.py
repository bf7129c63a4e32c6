"""What a person sees of a run: audio hours done and left, hours per hour, failures, time to go.

On a terminal a bar, elsewhere a line every half a minute. How much audio there is, is known of the
files that are done and estimated by size of those that are not, at the rate that the done ones had.
What is done of files that take long counts too, as far as it is heard of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.archives.inputs import Item
from cluster.archives.long_files import HowFar
from cluster.archives.rows import Row

LINE_S = 30.0


class RunProgress:
    """Progress of one run; a context manager. `now`: seconds of a steady clock."""

    def __init__(
        self,
        items: Iterable[Item],
        console: Console,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._about = {item.key: item.about_s for item in items}
        self._n_items = len(self._about)
        self._left_s = sum(self._about.values())
        self._guessed_s = 0.0  # of those that are done, before they were
        self._console, self._now = console, now
        self._started_s = self._told_s = now()
        self._bar = Progress(
            BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        self._task: TaskID | None = None
        self._lock = threading.Lock()  # rows and what is heard come in two threads
        self._at_work: dict[str, tuple[float, float]] = {}
        self.done_s = 0.0
        self.n_done = self.n_failed = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._task = self._bar.add_task(self.line(), total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Show no bar any more."""
        if self._task is not None:
            self._bar.stop()

    def add(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                about_s = self._about.pop(row["path"], 0.0)
                self._at_work.pop(row["path"], None)
                self._left_s -= about_s
                self.n_done += 1
                if row["error"] is not None:
                    self.n_failed += 1
                else:
                    self.done_s += row["duration"]
                    self._guessed_s += about_s
            self._tell()

    def heard(self, files: HowFar) -> None:
        """How far files at work are; those that are not named are not far. By any thread."""
        with self._lock:
            self._at_work = {path: far for path, far in files.items() if path in self._about}
            self._tell()

    def _tell(self) -> None:
        if self._task is not None:
            share = self._heard_s / max(1e-9, self._heard_s + self.left_s)
            self._bar.update(self._task, completed=share, description=self.line())
        elif self._now() - self._told_s >= LINE_S:
            self._told_s = self._now()
            self._console.print(f"splitscribe: {self.line()}", markup=False)

    @property
    def left_s(self) -> float:
        """Seconds of audio to go: estimates, corrected by how right they were so far."""
        right = self.done_s / self._guessed_s if self._guessed_s else 1.0
        left_s = max(0.0, self._left_s) * right
        for path, (done_s, known_s) in self._at_work.items():
            guessed_s = self._about[path] * right
            left_s += max(guessed_s, known_s) - done_s - guessed_s
        return max(0.0, left_s)

    @property
    def _heard_s(self) -> float:
        """Seconds of audio done, those of files at work too."""
        return self.done_s + sum(done_s for done_s, _ in self._at_work.values())

    @property
    def speed(self) -> float:
        """Hours of audio in an hour; 0 before anything is done."""
        return self._heard_s / max(1e-9, self._now() - self._started_s)

    def line(self) -> str:
        left_s, heard_s, speed = self.left_s, self._heard_s, self.speed
        about = "about " if self._about else ""
        words = [
            f"{self.n_done} of {self._n_items} files",
            f"{hours(heard_s)} of {about}{hours(heard_s + left_s)} of audio",
        ]
        if speed:
            words.append(f"{speed:.1f} hours per hour")
            words.append(f"{duration(left_s / speed)} to go")
        if self.n_failed:
            words.append(f"{self.n_failed} failed")
        return ", ".join(words)


def hours(seconds: float) -> str:
    """`12.3 h`, and minutes or seconds where that says more."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """`2 d 3 h`, `3 h 5 min`, `12 min`, `40 s`."""
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    n_hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = ((days, "d"), (n_hours, "h"), (minutes, "min"), (secs, "s"))
    said = [f"{n} {unit}" for n, unit in parts if n]
    return " ".join(said[:2]) or "0 s"
