"""How a server's processes share the cores, as the operating system has it."""

from __future__ import annotations

import os
import re
import sys

import psutil
import pytest

from cluster.common.priorities import BEHIND_ENCODER
from tests.e2e.conftest import Server

WORKERS = re.compile(r"ray::ServeReplica:splitscribe:(encoder|decoder|router)")
AUDIO = "router.audio.worker"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere cores are shared otherwise")
def test_workers_have_a_usual_priority_and_one_session(server: Server) -> None:
    processes = {
        process.pid: " ".join(process.cmdline())
        for process in psutil.Process(server.process.pid).children(recursive=True)
    }
    workers = [pid for pid, line in processes.items() if WORKERS.search(line)]
    audio = [pid for pid, line in processes.items() if AUDIO in line]
    assert len(workers) == 5  # two encoders, two decoders, a router
    assert audio
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers} == {0}
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in audio} == {BEHIND_ENCODER}
    assert len({os.getsid(pid) for pid in (*workers, *audio)}) == 1
    assert all(os.getpgid(pid) == pid for pid in audio)  # no Ctrl-C of a terminal's
