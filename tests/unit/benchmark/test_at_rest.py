"""What the benchmark of a server at rest takes a process for, and reads of it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from benchmark.serving.at_rest import at_rest
from benchmark.shared.server import BenchServer


def test_every_process_of_a_server_is_counted_by_its_kind() -> None:
    command = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "for title in ('ray::IDLE', 'ServeReplica:splitscribe:decoder', 'unknown'):\n"
            "    subprocess.Popen([sys.executable, '-c', sys.argv[1], title])\n"
            "while True: pass",
            "import time; time.sleep(60)",
        ]
    )
    server = BenchServer("", psutil.Process(command.pid))
    children: list[psutil.Process] = []
    try:
        while len(children) < 3:
            time.sleep(0.02)
            children = server.process.children()
        kinds = at_rest(server, 0.3)
    finally:
        for process in (*children, command):
            process.kill()
        command.wait()
    assert {name: kind.processes for name, kind in kinds.items()} == {
        "command": 1,
        "decoder": 1,
        "idle Ray workers": 1,
        "other": 1,
    }
    assert all(kind.pss_mb > 1 for kind in kinds.values())
    assert kinds["command"].cores > kinds["decoder"].cores
