"""Start a server, and measure the CPU time and the memory of its processes.

It is `splitscribe serve`, or a module that prints `ready at URL` as it does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SPLITSCRIBE = str(Path(sys.executable).with_name("splitscribe"))
START_S = 180.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchServer:
    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds by role: router, proxy, audio, encoder, decoder, other."""

        def used_s(process: psutil.Process) -> float:
            times = process.cpu_times()
            return times.user + times.system

        return self._by_role(used_s)

    def pss_bytes(self) -> dict[str, float]:
        """Return memory by role; a page that several processes map counts in parts."""
        return self._by_role(lambda process: process.memory_full_info().pss)

    def _by_role(self, measured: Callable[[psutil.Process], float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):
                sums[_role(process)] += measured(process)
        return sums

    def ray_address(self) -> str:
        """Raises LookupError if the server has started no Ray cluster."""
        for child in self.process.children(recursive=True):
            with suppress(psutil.Error):
                found = re.search(r"--gcs-address=(\S+)", " ".join(child.cmdline()))
                if found and child.name() == "raylet":
                    return found[1]
        raise LookupError("no process of the server is a raylet")


def _role(process: psutil.Process) -> str:
    title = " ".join(process.cmdline()) or process.name()
    for role in ("router", "encoder", "decoder"):
        if f"ServeReplica:splitscribe:{role}" in title:
            return role
    if "ProxyActor" in title:
        return "proxy"
    parent = process.parent()
    if parent is not None and "ServeReplica:splitscribe:router" in " ".join(parent.cmdline()):
        return "audio"
    return "other"


@contextmanager
def serving(
    *flags: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (SPLITSCRIBE, "serve"),
) -> Iterator[BenchServer]:
    """Run `splitscribe serve --port 0 FLAGS` from its ready line to Ctrl-C."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = os.path.join(folder, "log")
        with open(log_path, "w") as log:
            process = subprocess.Popen(
                [*command, "--port", "0", *flags],
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield BenchServer(_ready_url(process, log_path), psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:  # what was measured must not be lost with it
                print(f"the server did not stop within {STOP_S:.0f} s; killed", file=sys.stderr)
                own = psutil.Process(process.pid)
                for child in (*own.children(recursive=True), own):
                    with suppress(psutil.Error):
                        child.kill()
                process.wait()


def _ready_url(process: subprocess.Popen[bytes], log_path: str) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with open(log_path) as log:
            found = re.search(r"ready at (http://\S+)", log.read())
        if found:
            return found.group(1)
        time.sleep(0.2)
    with open(log_path) as log:
        raise SystemExit(f"the server did not start:\n{log.read()[-4000:]}")
