"""Floods on one connection: refused with a status or a close code, while others are served."""

from __future__ import annotations

import asyncio
import gc
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.websockets import WebSocketDisconnect

from router.http import listener
from router.http.listener import HttpListener
from tests.support.waiting import eventually

ANSWER_S = 20.0
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, CONTINUED, CLOSE, PING, PONG = 0x1, 0x0, 0x8, 0x9, 0xA


class Server:
    """What the application has seen. Answers to `/` are held until `may_answer` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.messages: list[str] = []
        self.endings: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_sent = asyncio.Event()
        self.listener: HttpListener

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/")
        async def root() -> str:
            self.asked += 1
            await self.may_answer.wait()
            return "here"

        @app.post("/")
        async def length(request: Request) -> int:
            return len(await request.body())

        @app.websocket("/ws")
        async def serve(websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                while True:
                    self.messages.append(await websocket.receive_text())
                    if self.messages[-1] == "much":
                        await websocket.send_bytes(bytes(20_000_000))
                        self.has_sent.set()
            except WebSocketDisconnect as left:
                self.endings.append(left.code)

        return app


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    server.listener = await HttpListener.open(server.app(), "127.0.0.1", 0)
    yield server
    await server.listener.close()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def flood(self, content: bytes) -> None:
        """Send as far as the server takes it; it may hang up."""
        try:
            self.writer.write(content)
            await self.writer.drain()
        except OSError:
            pass

    async def rest(self) -> bytes:
        """What comes until the server ends the connection."""
        got = bytearray()
        async with asyncio.timeout(ANSWER_S):
            try:
                while piece := await self.reader.read(65_536):
                    got += piece
            except OSError:
                pass
        return bytes(got)

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(ANSWER_S):
            first, length = await self.reader.readexactly(2)
            if length == 126:
                (length,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
            return first & 0xF, await self.reader.readexactly(length)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port, limit=65_536)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def upgraded(server: Server) -> AsyncIterator[Client]:
    async with connected(server) as client:
        client.writer.write(HANDSHAKE)
        async with asyncio.timeout(ANSWER_S):
            assert b" 101 " in await client.reader.readuntil(b"\r\n\r\n")
        yield client


def frame(kind: int, content: bytes = b"", is_last: bool = True) -> bytes:
    """As a client sends it, masked by zeros. content: at most 125 bytes."""
    return bytes([kind | (0x80 if is_last else 0), 0x80 | len(content)]) + bytes(4) + content


async def is_well(server: Server) -> None:
    async with connected(server) as client:
        await client.flood(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.rest()).endswith(b'"here"')


HEADS = {
    "a header without end": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 3_000_000,
    "a path without end": b"GET /" + b"a" * 3_000_000,
    "headers without end": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
async def test_a_head_without_end_gets_a_431(server: Server, head: bytes) -> None:
    async with connected(server) as client:
        sending = asyncio.create_task(client.flood(head))
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"65536 bytes" in answer
        await sending
    await is_well(server)
    assert server.asked == 1


async def test_trailers_without_end_end_the_connection(server: Server) -> None:
    async with connected(server) as client:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
        await client.flood(head + b"a: b\r\n" * 200_000)
        await client.rest()
    await is_well(server)


@pytest.mark.parametrize(
    ("said", "answer"), [(b"", b""), (b"\r\n", b""), (b"GET / HTTP/1.1\r\nHost:", b"HTTP/1.1 408 ")]
)
async def test_a_head_that_does_not_come_ends_the_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch, said: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.1)
    async with connected(server) as client:
        await client.flood(said)
        got = await client.rest()
        assert got.startswith(answer)
        assert bool(got) == bool(answer)


async def test_a_body_that_nobody_reads_ends_the_connection_if_it_does_not_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a request without a key, which is answered before its body has come."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    async with connected(server) as client:
        await client.flood(head)
        monkeypatch.setattr(listener, "HEAD_S", 0.1)
        await client.flood(b"12345678")
        assert b" 200 " in await client.rest()
    async with connected(server) as client:
        for _ in range(2):
            await client.flood(head)
            await eventually(lambda: server.asked >= 2)
            await client.flood(b"123456789")
        await client.flood(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.rest()).count(b" 200 ") == 3


async def test_the_time_for_a_head_is_not_counted_while_an_answer_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.05)
    server.may_answer.clear()
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with connected(server) as client:
        await client.flood(request + request[:9])
        await asyncio.sleep(0.2)
        server.may_answer.set()
        assert b" 200 " in (await client.rest()).partition(b"\r\n")[0]


async def test_few_requests_wait_on_a_connection_and_these_are_answered(server: Server) -> None:
    server.may_answer.clear()
    async with connected(server) as client:
        await client.flood(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        await eventually(lambda: server.asked >= 1)
        server.may_answer.set()
        answers = (await client.rest()).count(b"HTTP/1.1 200 ")
        assert answers == server.asked == 1 + listener.MAX_WAITING
    await is_well(server)


async def test_a_body_in_tiny_chunks_ends_the_connection_and_one_in_small_ones_does_not(
    server: Server,
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with connected(server) as client:
        sending = asyncio.create_task(client.flood(head + b"1\r\na\r\n" * 300_000))
        assert not await client.rest()
        await sending
    async with connected(server) as client:
        await client.flood(head + (b"80\r\n" + bytes(128) + b"\r\n") * 20_000 + b"0\r\n\r\n")
        assert (await client.rest()).endswith(b"2560000")
    await is_well(server)


FLOODS = {
    "pings": frame(PING),
    "pongs": frame(PONG, bytes(125)),
    "empty fragments": frame(CONTINUED, b"", is_last=False),
    "fragments of one byte": frame(CONTINUED, b"a", is_last=False),
}


@pytest.mark.parametrize("piece", FLOODS.values(), ids=FLOODS.keys())
async def test_a_flood_of_frames_is_closed_with_1008(server: Server, piece: bytes) -> None:
    async with upgraded(server) as client:
        sending = asyncio.create_task(
            client.flood(frame(TEXT, b"a", is_last=False) + piece * 200_000)
        )
        while (got := await client.frame())[0] != CLOSE:
            assert got[0] == PONG
        assert struct.unpack("!H", got[1][:2]) == (1008,)
        assert b"too many" in got[1]
        await client.rest()
        await sending
    assert server.endings == [1008]
    await is_well(server)


async def test_messages_wait_unparsed_until_they_are_taken_and_none_is_lost(
    server: Server,
) -> None:
    async with upgraded(server) as client:
        texts = [f"{i}" for i in range(2000)]
        await client.flood(b"".join(frame(TEXT, text.encode()) for text in texts) + frame(CLOSE))
        assert await client.frame() == (CLOSE, b"")
        await client.rest()
    assert server.messages == texts
    assert server.endings == [1005]


async def test_the_time_for_a_head_is_not_that_of_a_websocket(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.05)
    async with upgraded(server) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.frame(), 0.3)
        await client.flood(frame(TEXT, b"still here") + frame(CLOSE))
        assert await client.frame() == (CLOSE, b"")
    assert server.messages == ["still here"]


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_message_goes_with_its_connection(server: Server, missing: int) -> None:
    """Not when Python looks for cycles, which it does seldom where objects are few and large."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        async with upgraded(server) as client:
            head = b"\x81\xff" + struct.pack("!Q", 4_000_000 + missing) + bytes(4)
            await client.flood(head + bytes(4_000_000))
            await eventually(lambda: tracemalloc.get_traced_memory()[0] >= 4_000_000)
            await eventually(lambda: bool(server.messages or missing))
            server.messages.clear()
            client.writer.transport.abort()
        await eventually(lambda: bool(server.endings))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert kept < 1_000_000


async def test_a_client_that_reads_nothing_gets_no_pongs(server: Server) -> None:
    async with upgraded(server) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.flood(frame(TEXT, b"much"))
        async with asyncio.timeout(ANSWER_S):
            await server.has_sent.wait()
            await client.flood(frame(PING, b"lost") * 50 + frame(TEXT, b"go"))
            await eventually(lambda: server.messages == ["much", "go"])  # it is behind the pings
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.frame())[1]) == 20_000_000
        await client.flood(frame(CLOSE))
        assert (await client.frame())[0] == CLOSE
