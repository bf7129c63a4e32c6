"""The router's own HTTP server: it shares its port, ends cleanly, and says when it is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from cluster.common.errors import ConfigurationError, WorkerError
from cluster.serve.replicas.router_replica import open_listener
from router.http.listener import HttpListener
from router.http.routes import create_app
from tests.support.router_fakes import FakeTranscriber, make_registry, make_settings, post

LOCAL = "127.0.0.1"


class Door:
    """Tells when a request has come in, and holds it until it may be answered."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.may_answer = asyncio.Event()


def make_app(answer: str, door: Door | None = None) -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def root() -> str:
        if door is not None:
            door.entered.set()
            await door.may_answer.wait()
        return answer

    return app


async def ask(port: int) -> str:
    """Over a connection of its own, which the server closes."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.rpartition(b"\r\n")[2].decode().strip('"')


async def until_refused(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(LOCAL, port)
        except ConnectionResetError:  # it came in the moment of closing
            continue
        except ConnectionRefusedError:
            return
        writer.close()


async def test_closing_finishes_what_is_in_flight_and_takes_nothing_new() -> None:
    door = Door()
    listener = await HttpListener.open(make_app("done", door), LOCAL, 0)
    asked = asyncio.create_task(ask(listener.port))
    await door.entered.wait()
    closing = asyncio.create_task(listener.close())
    await asyncio.wait_for(until_refused(listener.port), 30)
    assert not asked.done()
    door.may_answer.set()
    assert await asked == "done"
    await closing


async def test_a_client_that_reads_nothing_of_a_stream_does_not_hold_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.http.listener.STUCK_MS", 300)
    app, ended = FastAPI(), asyncio.Event()

    @app.get("/")
    async def root(n_pieces: int) -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            try:
                for _ in range(n_pieces):
                    yield bytes(1 << 20)
            finally:
                ended.set()

        return StreamingResponse(events())

    listener = await HttpListener.open(app, LOCAL, 0)
    try:
        for n_pieces in (10_000, 8):
            ended.clear()
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # it takes little ahead
            client.connect((LOCAL, listener.port))
            reader, writer = await asyncio.open_connection(sock=client)
            query = f"GET /?n_pieces={n_pieces} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            writer.write(query.encode())
            n_read = 0
            if n_pieces == 8:
                while piece := await reader.read(1 << 20):
                    n_read += len(piece)
                    await asyncio.sleep(0.01)
                assert n_read > 8 << 20
            await asyncio.wait_for(ended.wait(), 20)
            writer.close()
    finally:
        await listener.close()


async def test_replicas_share_a_port_and_the_one_that_stays_answers() -> None:
    first = await HttpListener.open(make_app("first"), LOCAL, 0)
    second = await HttpListener.open(make_app("second"), LOCAL, first.port)
    assert {await ask(first.port) for _ in range(64)} == {"first", "second"}
    await first.close()
    assert {await ask(second.port) for _ in range(8)} == {"second"}
    await second.close()


async def test_a_closed_port_is_free_for_its_successor() -> None:
    """Connections that the server closed stay in TIME_WAIT, which must not keep it out."""
    port = 0
    for _ in range(2):
        listener = await HttpListener.open(make_app("here"), LOCAL, port)
        port = listener.port
        assert await ask(port) == "here"
        await listener.close()


async def test_a_server_that_ended_is_told() -> None:
    listener = await HttpListener.open(make_app("here"), LOCAL, 0)
    listener.check()
    await listener.close()
    with pytest.raises(WorkerError, match="has ended"):
        listener.check()


async def test_an_application_that_does_not_start_is_told() -> None:
    @asynccontextmanager
    async def broken(_: FastAPI) -> AsyncIterator[None]:
        raise OSError("no room")
        yield

    with pytest.raises(WorkerError, match="did not start"):
        await HttpListener.open(FastAPI(lifespan=broken), LOCAL, 0)


async def test_only_a_router_that_is_to_listen_does() -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings())
    assert await open_listener(app, make_settings(listener="serve", port=0)) is None
    foreign = make_settings(listener="router", host="192.0.2.1", port=0)
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1"):
        await open_listener(app, foreign)
    listener = await open_listener(app, make_settings(listener="router", port=0))
    assert listener is not None
    async with httpx.AsyncClient(base_url=f"http://{LOCAL}:{listener.port}") as client:
        answer = await post(client)
    assert answer.json()["text"]
    assert len(answer.headers.get_list("x-request-id")) == 1
    await listener.close()


async def test_a_port_that_stays_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.listener.BIND_S", 0.1)
    with (
        socket.create_server((LOCAL, 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        await HttpListener.open(make_app("here"), LOCAL, taken.getsockname()[1])
