"""What a person sees while files are transcribed: a bar for the whole and one per running file.

The whole is counted in seconds of audio. How much there is turns up as files are opened; what the
unopened ones hold is estimated by their bytes. Knows nothing of transcription.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class FileProgress:
    """One file: its size, and what is known of its audio by now."""

    size: int
    done_s: float = 0.0
    known_s: float = 0.0
    ended: bool = False


def estimated_total_s(files: Collection[FileProgress]) -> float:
    """Seconds of audio in all files, at the bytes per second of those that were opened."""
    opened = [file for file in files if file.known_s > 0]
    known_s = sum(file.known_s for file in opened)
    opened_bytes = sum(file.size for file in opened)
    open_bytes = sum(file.size for file in files if not file.ended and file.known_s <= 0)
    return known_s + (open_bytes * known_s / opened_bytes if opened_bytes else 0.0)


class ProgressBoard:
    """Bars on a terminal. A context manager: they are there while it is entered."""

    def __init__(self, files: Iterable[Path], console: Console) -> None:
        self.console = console
        self._files = {file: FileProgress(file.stat().st_size) for file in files}
        self._tasks: dict[Path, TaskID] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self._whole: TaskID | None = None
        if len(self._files) > 1:
            self._whole = self._progress.add_task("", total=None, state="")
            self._show_whole()

    def __enter__(self) -> ProgressBoard:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, file: Path) -> None:
        self._tasks[file] = self._progress.add_task(file.name, total=None, state="")

    def advance(self, file: Path, done_s: float, known_s: float) -> None:
        state = self._files[file]
        state.done_s, state.known_s = done_s, max(done_s, known_s)
        self._progress.update(
            self._tasks[file], completed=done_s, total=state.known_s, state=_seconds(state)
        )
        self._show_whole()

    def end(self, file: Path) -> None:
        """Well or not: the file is through. With several files its bar goes."""
        state = self._files[file]
        state.ended = True
        state.known_s = state.done_s
        if self._whole is not None:
            self._progress.remove_task(self._tasks.pop(file))
        self._show_whole()

    def _show_whole(self) -> None:
        if self._whole is None:
            return
        files: Sequence[FileProgress] = list(self._files.values())
        n_ended = sum(file.ended for file in files)
        done_s, total_s = sum(file.done_s for file in files), estimated_total_s(files)
        about = "" if all(file.ended or file.known_s for file in files) else "about "
        self._progress.update(
            self._whole,
            description=f"{n_ended} of {len(files)} files",
            completed=done_s,
            total=total_s or None,
            state=f"{done_s:.0f}/{about}{total_s:.0f} s" if total_s else "",
        )


def _seconds(state: FileProgress) -> str:
    return f"{state.done_s:.0f}/{state.known_s:.0f} s"
