"""Servers that answer every upload at once, each in one process: ceilings. They decode nothing.

`bare_server` is one asyncio protocol, which shows what a load client can reach at most: it reads a
request to its end and sends a transcript, as JSON or as server-sent events where the form has
`stream`. `bare_uvicorn` reads the form with uvicorn and Starlette: the ceiling of everything that
answers HTTP from Python.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import psutil

TEXT = "a line that is always the same"
STREAM_FIELD = b'name="stream"\r\n\r\ntrue'

_EVENTS = [{"type": "transcript.text.delta", "delta": f"{word} "} for word in TEXT.split()]
_EVENTS.append({"type": "transcript.text.done", "text": TEXT})
_EVENT_STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in _EVENTS) + "data: [DONE]\n\n"


def _response(content_type: str, body: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


ANSWER = _response("application/json", json.dumps({"text": TEXT}))
STREAM = _response("text/event-stream", _EVENT_STREAM)


class _Connection(asyncio.Protocol):
    """One client, one request after the other."""

    def __init__(self) -> None:
        self._read = bytearray()
        self._wanted = 0  # bytes of the request at the start of what was read; 0: not known yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self._wanted:
            head, end, _ = bytes(self._read[:4096]).partition(b"\r\n\r\n")
            if not end:
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._wanted = len(head) + len(end) + int(length or 0)
        if len(self._read) >= self._wanted:
            self._transport.write(STREAM if STREAM_FIELD in self._read[:4096] else ANSWER)
            self._read.clear()
            self._wanted = 0


@dataclass(frozen=True, slots=True)
class BareServer:
    """One that runs."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far."""
        times = self.process.cpu_times()
        return {"bare": times.user + times.system}


def bare_server() -> AbstractContextManager[BareServer]:
    """The protocol, while the block lasts."""
    return _in_process(_run_protocol)


def bare_uvicorn() -> AbstractContextManager[BareServer]:
    """uvicorn and Starlette, while the block lasts."""
    return _in_process(_run_uvicorn)


@contextmanager
def _in_process(run: Callable[[socket.socket], None]) -> Iterator[BareServer]:
    """`run` with a socket that listens already, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = context.Process(target=run, args=(listening,), daemon=True)
        process.start()
        port = listening.getsockname()[1]
    try:
        yield BareServer(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.join()


def _run_protocol(listening: socket.socket) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Connection, sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


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
            return JSONResponse({"text": f"{len(await upload.read())} bytes"})

    app = Starlette(routes=[Route("/v1/audio/transcriptions", receive, methods=["POST"])])
    config = uvicorn.Config(app, log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
