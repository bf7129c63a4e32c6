"""The cluster under fault. Only descendants of what was started here are ever touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import health_of, start_server, stop_server

ROLES = ("router", "encoder", "decoder")
AUDIO_WORKERS = 2  # of each router, at most
SPOOL_MB = 64
IDLE_S = 45.0  # leases of a dead reader end within 15 s; queues within a request's time
KEEP_FILES = ("router", "encoder", "decoder", "audio")
MORE_FILES = 16  # a replaced worker's connections are made anew, some of them later
MARKS = {
    "router": "ray::ServeReplica:splitscribe:router",
    "encoder": "ray::ServeReplica:splitscribe:encoder",
    "decoder": "ray::ServeReplica:splitscribe:decoder",
    "audio": "router.audio.worker",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "gcs": "gcs/gcs_server",
    "raylet": "raylet/raylet",
}


@dataclass(slots=True)
class Target:
    """roots: processes from which all others descend. wanted: replicas of each role.

    spool: the folder of uploads; None: the system's. spool_bytes: the size of its disk.
    """

    url: str
    roots: Callable[[], list[psutil.Process]]
    wanted: Mapping[str, int]
    spool: Path | None = None
    spool_bytes: int = 0
    hosts: Any = None  # what several hosts are to the faults of hosts

    def everything(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for root in self.roots():
            with suppress(psutil.Error):
                found |= {one.pid: one for one in (root, *root.children(recursive=True))}
        return list(found.values())

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in MARKS}
        for one in self.everything():
            with suppress(psutil.Error):
                command = " ".join(one.cmdline())
                for kind, mark in MARKS.items():
                    if mark in command and one.status() != psutil.STATUS_ZOMBIE:
                        found[kind].append(one)
        return found

    def processes(self, kind: str) -> list[psutil.Process]:
        return self.by_kind()[kind]

    def health(self) -> dict[str, Any]:
        return health_of(self.url)

    def workers(self, role: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.health()["pools"][role]["workers"]
        return found

    def evictions(self) -> dict[str, int]:
        workers = self.workers("encoder")
        return {one["replica"]: int(one["extra"]["cache_evictions"]) for one in workers}

    def missing(self) -> str:
        try:
            health = self.health()
        except (httpx.HTTPError, ValueError) as error:
            return f"no health: {error!r}"
        if health.get("status") != "ready":
            return f"its status is {health.get('status')}"
        for role in ("encoder", "decoder"):
            workers = health["pools"][role]["workers"]
            if sum(one["healthy"] for one in workers) != self.wanted[role]:
                return f"{len(workers)} {role}s answer, not {self.wanted[role]}"
        # One replica more is an old one that still drains, or a frozen one.
        by_kind = self.by_kind()
        counts = {kind: len(by_kind[kind]) for kind in ROLES}
        with suppress(psutil.Error):
            for kind, found in by_kind.items():
                if any(one.status() == psutil.STATUS_STOPPED for one in found):
                    return f"a frozen {kind}"
        if counts != dict(self.wanted):
            return f"processes: {counts}, wanted: {dict(self.wanted)}"
        # A router starts with one audio worker, and gets the others once there is work for them.
        n_audio, n_routers = len(by_kind["audio"]), self.wanted["router"]
        if not n_routers <= n_audio <= AUDIO_WORKERS * n_routers:
            return f"{n_audio} audio workers of {n_routers} routers"
        return ""

    def left_over(
        self, files_before: Mapping[str, int] | None = None, timeout_s: float = IDLE_S
    ) -> list[str]:
        """Waits for it to go away. files_before: open files of each kind when it was last idle."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self._left_over() or self._more_files(files_before or {})
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(0.5)

    def _left_over(self) -> list[str]:
        if missing := self.missing():
            return [missing]
        found = []
        health = self.health()
        for role in ("encoder", "decoder"):
            for worker in health["pools"][role]["workers"]:
                name, extra = worker["replica"], worker.get("extra", {})
                if worker["pages_free"] != worker["pages_total"]:
                    free = f"{worker['pages_free']} of {worker['pages_total']}"
                    found.append(f"{name}: {free} pages free")
                busy = ("queued", "running")
                found += [f"{name}: {worker[what]} {what}" for what in busy if worker[what]]
                for what in ("leases", "pages_quarantined"):
                    if extra.get(what):
                        found.append(f"{name}: {extra[what]:g} {what}")
        if health["router"]["requests"]:
            found.append(f"a router holds {health['router']['requests']} requests")
        return found

    def _more_files(self, before: Mapping[str, int]) -> list[str]:
        now = self.files()
        return [
            f"{now[kind] - n} files more are open in {kind} processes"
            for kind, n in before.items()
            if kind in KEEP_FILES and now.get(kind, 0) > n + MORE_FILES
        ]

    def files(self) -> dict[str, int]:
        """Open files of each role's processes, in all; of audio workers, the most that one has."""
        counts: dict[str, int] = {}
        for kind, found in self.by_kind().items():
            with suppress(psutil.Error):
                total = max if kind == "audio" else sum  # audio workers start when there is work
                counts[kind] = total(one.num_fds() for one in found)
        return counts

    def memory_bytes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for kind, found in self.by_kind().items():
            with suppress(psutil.Error):
                counts[kind] = sum(one.memory_info().rss for one in found)
        return counts


@contextmanager
def local_target(
    folder: Path | None = None, *, env: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """In float32, with one spare of each role. With root its uploads lie on a disk of SPOOL_MB."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spool = folder / "spool"
        spool.mkdir()
        on_own_disk = os.geteuid() == 0 and _mounted(spool)
        if on_own_disk:
            stack.callback(subprocess.run, ["umount", "--lazy", spool], check=False)
        settings = {
            "SPLITSCRIBE_ROUTER__REPLICAS": "2",
            "SPLITSCRIBE_ROUTER__AUDIO_WORKERS": str(AUDIO_WORKERS),
            "TMPDIR": str(spool),
            "RAY_TMPDIR": "/tmp",  # its sockets' paths must be short, and its disk is another
        }
        server = start_server(
            folder,
            *("--encoders", "2", "--decoders", "2", "--dtype", "float32", "--placement", "split"),
            env={**settings, **(env or {})},
        )
        root = psutil.Process(server.process.pid)
        target = Target(
            server.url,
            lambda: [root],
            {"router": 2, "encoder": 2, "decoder": 2},
            spool,
            SPOOL_MB * 2**20 if on_own_disk else 0,
        )
        try:
            yield target
        except Exception:
            print(server.output()[-20_000:], file=sys.stderr)
            raise
        finally:
            ours = target.everything()
            status = stop_server(server)
            _, alive = psutil.wait_procs(ours, timeout=10)
            (folder / "serve.log").write_text(server.output())
        if status != 0 or alive:
            raise AssertionError(f"serve ended with {status}, and left {alive}")


def _mounted(folder: Path) -> bool:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_MB}m", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0
