"""Shared by the benchmarks: start a server, find its processes, count their CPU time.

The servers are `splitscribe serve`, or a module that prints `ready at URL` as it does, and a bare
uvicorn that reads the same upload: the ceiling of everything that answers HTTP from Python.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SPLITSCRIBE = str(Path(sys.executable).with_name("splitscribe"))
START_S = 180.0


@dataclass(frozen=True, slots=True)
class BenchServer:
    """One running server."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by kind of process: router, proxy, audio, encoder, decoder, other."""
        seconds: dict[str, float] = {}
        for child in self.process.children(recursive=True):
            try:
                times, kind = child.cpu_times(), _kind(child)
            except psutil.Error:
                continue
            seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
        return seconds


def _kind(process: psutil.Process) -> str:
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


@dataclass(frozen=True, slots=True)
class BareServer:
    """One process that reads the upload and answers."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        times = self.process.cpu_times()
        return {"bare": times.user + times.system}


@contextmanager
def bare_uvicorn() -> Iterator[BareServer]:
    """uvicorn and Starlette, which read the form of the transcriptions endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_bare, args=(port,), daemon=True)
    process.start()
    try:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield BareServer(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.join()


def _run_bare(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def receive(request: Request) -> JSONResponse:
        async with request.form() as form:
            upload = form["file"]
            assert not isinstance(upload, str)
            return JSONResponse({"text": f"{len(await upload.read())} bytes"})

    routes = [Route("/v1/audio/transcriptions", receive, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="error", access_log=False)


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
            process.wait(60)


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
