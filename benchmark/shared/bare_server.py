"""uvicorn and Starlette that read an upload and answer at once: the ceiling of HTTP from Python."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

TEXT = "a line that is always the same"


@dataclass(frozen=True, slots=True)
class BareServer:
    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        times = self.process.cpu_times()
        return {"bare": times.user + times.system}


@contextmanager
def bare_uvicorn() -> Iterator[BareServer]:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = context.Process(target=_run_uvicorn, args=(listening,), daemon=True)
        process.start()
        port = listening.getsockname()[1]
    try:
        yield BareServer(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.join()


def _run_uvicorn(listening: socket.socket) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def receive(request: Request) -> JSONResponse:
        async with request.form() as form:
            upload = form["file"]
            assert not isinstance(upload, str)
            await upload.read()
            return JSONResponse({"text": TEXT})

    app = Starlette(routes=[Route("/v1/audio/transcriptions", receive, methods=["POST"])])
    config = uvicorn.Config(app, log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
