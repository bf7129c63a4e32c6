"""Signals ask a server to stop, whatever locks the interrupted code holds, and only once."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
from collections.abc import Iterator
from functools import partial

import psutil
import pytest
from typer.testing import CliRunner

from cluster.cli import foreground
from cluster.cli.foreground import GAVE_UP, SIGNALS, StopSignals
from cluster.cli.main import app
from cluster.serve.start.launch import kill_children


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_needs_no_lock_that_the_interrupted_code_holds(number: int) -> None:
    """The event's own lock is held while the signal comes: a handler that set it would hang."""
    with StopSignals() as asked:
        with asked._cond:
            os.kill(os.getpid(), number)
            assert not asked.is_set()
        assert asked.wait(20.0)


def test_a_terminal_that_has_gone_keeps_nobody_from_stopping() -> None:
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    try:
        with StopSignals() as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked.wait(20.0)
    finally:
        os.dup2(kept, 2)
        for descriptor in (kept, writing):
            os.close(descriptor)


@pytest.mark.parametrize(
    ("leaves", "calls", "line"),
    [
        (False, [GAVE_UP], "not stopped within 0 s"),
        (True, ["left", 0], "stopped before it was ready"),
    ],
)
def test_a_stop_that_takes_too_long_or_a_start_that_may_leave_ends_the_process(
    leaves: bool, calls: list[object], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    called: queue.Queue[object] = queue.Queue()
    with StopSignals(limit_s=0.0, give_up=called.put) as asked:
        asked.leave = partial(called.put, "left") if leaves else None
        os.kill(os.getpid(), signal.SIGTERM)
        assert [called.get(timeout=20.0) for _ in calls] == calls
    assert called.empty()
    assert line in capfd.readouterr().err


def test_leaving_a_start_kills_all_that_it_has_started_and_what_these_have() -> None:
    script = "setsid sh -c 'sleep 600 & wait' & wait"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as child:
        started = psutil.Process(child.pid)
        while len(below := started.children(recursive=True)) < 2:
            assert child.poll() is None
        kill_children(started)
        assert psutil.wait_procs(below, 20.0)[1] == []


def test_what_a_signal_does_is_told_in_json_where_lines_are_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopSignals(encoding="json") as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(20.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"].startswith("SIGTERM: stopping")


def test_before_anything_is_started_a_signal_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_leave: list[bool] = []
    monkeypatch.setattr(
        foreground,
        "serve_foreground",
        lambda _settings, _console, stop, **_: may_leave.append(stop.leave is not None),
    )
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert may_leave == [True]
