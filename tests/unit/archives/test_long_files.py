"""How far a long file is reaches its run, and a short one costs no message."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.archives import long_files
from cluster.archives.long_files import Board, noted


class LocalBoard:
    """A board whose calls are made at once, as an actor's handle makes them later."""

    def __init__(self) -> None:
        self.board = Board()
        self.n_calls = 0

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: LocalBoard, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *values: Any) -> Any:
        self._handle.n_calls += 1
        return getattr(self._handle.board, self._name)(*values)


def test_a_long_file_is_on_the_board_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(long_files.time, "monotonic", lambda: now[0])
    handle = LocalBoard()
    with noted(handle, "/talk.mp3") as note:
        assert note is not None
        note(30.0, 60.0)
        assert handle.board.read() == {}, "it may be done soon"
        now[0] += long_files.NOTE_S
        note(60.0, 3600.0)
        note(90.0, 3600.0)
        assert handle.board.read() == {"/talk.mp3": (60.0, 3600.0)}
        now[0] += long_files.NOTE_S
        note(120.0, 3600.0)
        assert handle.board.read() == {"/talk.mp3": (120.0, 3600.0)}
    assert handle.board.read() == {}
    assert handle.n_calls == 3


def test_a_short_file_costs_no_message() -> None:
    handle = LocalBoard()
    with noted(handle, "/clip.mp3") as note:
        assert note is not None
        note(5.0, 5.0)
    assert handle.n_calls == 0


def test_nobody_has_to_ask() -> None:
    with noted(None, "/talk.mp3") as note:
        assert note is None
