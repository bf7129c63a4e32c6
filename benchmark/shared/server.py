"""Start a server, find its processes, count their CPU time.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

SPLITSCRIBE = str(Path(sys.executable).with_name("splitscribe"))
START_S = 180.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchServer:
    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """By kind of process: router, proxy, audio, encoder, decoder, other."""
        seconds: dict[str, float] = {}
        for child in self.process.children(recursive=True):
            try:
                times, kind = child.cpu_times(), _role(child)
            except psutil.Error:
                continue
            seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
        return seconds

    def metrics(self) -> dict[str, float]:
        """What this machine's exporter tells, each series' name with the sum over its labels.

        Workers tell it every 10 s. Raises LookupError: there is no exporter.
        """
        sums: dict[str, float] = {}
        with httpx.Client(timeout=20.0) as client:
            text = client.get(f"http://{self._exporter()}/metrics").raise_for_status().text
        for line in text.splitlines():
            if found := _SAMPLE.match(line):
                sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
        return sums

    def ray_address(self) -> str:
        """Raises LookupError: it has started no Ray cluster."""
        for child in self.process.children(recursive=True):
            with suppress(psutil.Error):
                found = re.search(r"--gcs-address=(\S+)", " ".join(child.cmdline()))
                if found and child.name() == "raylet":
                    return found[1]
        raise LookupError("no process of the server is a raylet")

    def _exporter(self) -> str:
        """Where this node's metrics are: Ray writes the port into its session's folder."""
        for child in self.process.children(recursive=True):
            try:
                command = " ".join(child.cmdline())
            except psutil.Error:
                continue
            host = re.search(r"--node_ip_address=(\S+)", command)
            folder = re.search(r"--session_dir=(\S+)", command)
            if host and folder:
                for file in Path(folder[1]).glob("metrics_export_port_*"):
                    return f"{host[1]}:{file.read_text().strip()}"
        raise LookupError("no process of the server says where its metrics are")


_SAMPLE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)$")

RAY_PARTS = {  # in a command line, to what a reader knows it by
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "Ray's dashboard",
    "ray-dashboard-": "Ray's dashboard, parts",
    "multiprocessing.forkserver": "Ray's dashboard, parts",
    "multiprocessing.resource_tracker": "Ray's dashboard, parts",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "log_monitor.py": "log monitor",
    "monitor.py": "autoscaler's monitor",
    "ServeController": "Serve's controller",
    "ray::IDLE": "idle Ray workers",
}


def process_kind(process: psutil.Process, command: psutil.Process) -> str:
    """What a process of a server is: a role's worker, the command itself, or a part of Ray."""
    if process.pid == command.pid:
        return "command"
    if (kind := _role(process)) != "other":
        return kind
    title = " ".join(process.cmdline()) or process.name()
    return next((kind for part, kind in RAY_PARTS.items() if part in title), "other")


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


def cpu_ms_each(
    before_s: Mapping[str, float], after_s: Mapping[str, float], n_requests: int
) -> dict[str, float]:
    return {
        kind: 1000 * (used_s - before_s.get(kind, 0.0)) / n_requests
        for kind, used_s in after_s.items()
    }


@contextmanager
def serving(
    *flags: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (SPLITSCRIBE, "serve"),
) -> Iterator[BenchServer]:
    """`splitscribe serve --port 0 FLAGS`, from its ready line to Ctrl-C."""
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
