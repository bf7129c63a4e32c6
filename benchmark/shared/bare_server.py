"""A server that answers every upload at once: what a load client can reach at most.

One process, one asyncio protocol: it reads a request to its end and sends a transcript, as JSON or
as server-sent events where the form has `stream`. It decodes nothing.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

START_S = 30.0
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


async def _serve(ready: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _run(ready: Connection) -> None:
    asyncio.run(_serve(ready))


@contextmanager
def bare_server() -> Iterator[str]:
    """Its URL, while it runs in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise SystemExit("the bare server did not start")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()
