"""How far files are that take long: told by those who transcribe them to the run that waits.

A row comes when a file is done, which for hours of audio takes a while. Transcribers tell a
`Board`, a small actor of the run, how far such files are, and the run asks it now and then. All of
it may fail without harm: it changes what is shown, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster.serve.bulk.engine import OnProgress

NOTE_S = 2.0  # between two notes of one file, and before its first
ASK_S = 2.0  # between two looks at the board
ANSWER_S = 10.0

HowFar = Mapping[str, tuple[float, float]]  # by path: seconds of audio done, seconds known


class Board:
    """Who is how far. Runs as an actor, which `make_board` starts."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[float, float]] = {}

    def note(self, path: str, done_s: float, known_s: float) -> None:
        self._files[path] = done_s, known_s

    def forget(self, path: str) -> None:
        """It is done, or was given up."""
        self._files.pop(path, None)

    def read(self) -> dict[str, tuple[float, float]]:
        return dict(self._files)


def make_board() -> Any:
    """A board in the Ray cluster of this process, without a core of its own; it ends with it."""
    import ray

    return ray.remote(num_cpus=0)(Board).remote()


@contextmanager
def noted(board: Any | None, path: str) -> Iterator[OnProgress | None]:
    """What a transcriber calls while it works on a file."""
    if board is None:
        yield None
        return
    due_s, told = time.monotonic() + NOTE_S, False

    def note(done_s: float, known_s: float) -> None:
        nonlocal due_s, told
        if (now := time.monotonic()) >= due_s:
            due_s, told = now + NOTE_S, True
            board.note.remote(path, done_s, known_s)

    try:
        yield note
    finally:
        if told:
            board.forget.remote(path)


@contextmanager
def watched(board: Any, tell: Callable[[HowFar], None]) -> Iterator[None]:
    """Hand on what is on the board, in a thread, until the block is left."""
    import ray

    left = threading.Event()

    def watch() -> None:
        while not left.wait(ASK_S):
            try:
                files = ray.get(board.read.remote(), timeout=ANSWER_S)
            except ray.exceptions.RayError:
                continue
            tell(files)

    thread = threading.Thread(target=watch, daemon=True, name="long-files")
    thread.start()
    try:
        yield
    finally:
        left.set()
