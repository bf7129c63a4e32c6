"""`splitscribe serve` stops cleanly whatever signals come and whenever: nothing of it remains.

Each combination is tried SIGNAL_TRIES times, 14 s each; those at the start are spread over it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SPLITSCRIBE, start_server, wait_until

TRIES = int(os.environ.get("SIGNAL_TRIES", "4"))
STOP_S = 95.0  # a second limit, above the one that the server sets itself
GONE_S = 20.0  # for the last worker to notice that its node has gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 90 * TRIES)]


@dataclass(frozen=True, slots=True)
class Burst:
    """Signals that come one `gap_s` after another; to_group: as Ctrl-C in a terminal sends them."""

    signals: tuple[signal.Signals, ...]
    gap_s: float = 0.0
    to_group: bool = False

    def send(self, process: subprocess.Popen[str]) -> None:
        for number in self.signals:
            if process.poll() is None:
                (os.killpg if self.to_group else os.kill)(process.pid, number)
            time.sleep(self.gap_s)


INT, TERM = signal.SIGINT, signal.SIGTERM
BURSTS = {
    "SIGINT": Burst((INT,)),
    "SIGTERM": Burst((TERM,)),
    "both at once": Burst((INT, TERM)),
    "SIGINT twice": Burst((INT, INT)),
    "SIGTERM twice, the second while it stops": Burst((TERM, TERM), 0.7),
    "all through the stop": Burst((INT, TERM) * 40, 0.2),
    "Ctrl-C twice": Burst((INT, INT), 0.3, to_group=True),
}


def members(session: int) -> list[psutil.Process]:
    """What runs in the session of a server: Ray's processes and all workers stay in it."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def ends_cleanly(process: subprocess.Popen[str], output: Callable[[], str]) -> None:
    try:
        status = process.wait(STOP_S)
        assert status == 0, f"status {status}:\n{output()[-4000:]}"
        assert "Traceback" not in output(), output()[-4000:]
        wait_until(lambda: not members(process.pid), GONE_S, "no process is left")
    finally:
        for left in members(process.pid):
            left.kill()


@pytest.mark.parametrize("burst", BURSTS.values(), ids=BURSTS.keys())
def test_a_running_server_stops(burst: Burst, tmp_path: Path) -> None:
    for _ in range(TRIES):
        server = start_server(tmp_path)
        burst.send(server.process)
        ends_cleanly(server.process, server.output)


@pytest.mark.parametrize("name", BURSTS)
def test_a_starting_server_stops(name: str, tmp_path: Path) -> None:
    burst, chance = BURSTS[name], random.Random(name)  # each combination has its own moments
    for turn in range(TRIES):
        lines: list[str] = []
        process = subprocess.Popen(
            [SPLITSCRIBE, "serve", "--port", "0"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        wait_until(lambda lines=lines: lines, 60.0, "its first line")
        time.sleep((turn + chance.random()) / TRIES * 15.0)  # the moment is what is tested
        burst.send(process)
        ends_cleanly(process, lambda lines=lines: "".join(lines))
        if not any("ready at" in line for line in lines):
            assert not any("ends within" in line for line in lines), "it left at once"
