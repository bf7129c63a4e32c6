"""A router's own listener with a fake engine behind it, and what a test says to a session."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cluster.common.settings import RouterSettings
from router.http.listener import HttpListener
from router.http.routes import create_app
from tests.support.live.fake_engine import FakeLiveEngine
from tests.support.router_fakes import FakeTranscriber, make_registry, make_settings
from tests.support.waiting import eventually

ANSWER_S = 20.0
RATE = 24_000


class Door:
    def __init__(self, engine: FakeLiveEngine, listener: HttpListener, app: Any) -> None:
        self.engine, self.app, self.port = engine, app, listener.port

    def url(self, query: str = "?intent=transcription") -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime{query}"

    def connect(self, query: str = "?intent=transcription", **options: Any) -> connect:
        return connect(self.url(query), compression=None, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        sent = options if body is None else {"json": body, **options}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as client:
            return await client.post(f"/v1/realtime/{path}", **sent)

    async def none_left(self) -> None:
        realtime, sessions = self.app.state.realtime, self.engine.sessions
        await eventually(lambda: not realtime.sessions and all(one.closed for one in sessions))


@asynccontextmanager
async def opened(settings: RouterSettings | None = None, **options: Any) -> AsyncIterator[Door]:
    engine = FakeLiveEngine()
    app = create_app(
        make_registry(FakeTranscriber(), live=engine), settings or make_settings(), **options
    )
    listener = await HttpListener.open(app, "127.0.0.1", 0)
    try:
        yield Door(engine, listener, app)
    finally:
        await listener.close()


async def send(socket: ClientConnection, type: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": type, **fields}))


async def append(socket: ClientConnection, audio: bytes) -> None:
    encoded = base64.b64encode(audio).decode()
    await send(socket, "input_audio_buffer.append", audio=encoded)


async def until(socket: ClientConnection, *types: str) -> list[dict[str, Any]]:
    events = []
    async with asyncio.timeout(ANSWER_S):
        while True:
            events.append(json.loads(await socket.recv()))
            if events[-1]["type"].endswith(types):
                return events


async def closed(socket: ClientConnection) -> int | None:
    """Read until the server closes the connection, and return its code."""
    with pytest.raises(ConnectionClosed):
        await until(socket, "never")
    return socket.close_code


async def read_nothing(
    socket: ClientConnection, is_closed: Callable[[], Awaitable[bool]], most_s: float
) -> None:
    try:
        socket.transport.pause_reading()
        update = {"audio": {"input": {"transcription": {"prompt": "word " * 1900}}}}
        async with asyncio.timeout(most_s):
            while not await is_closed():
                try:
                    async with asyncio.timeout(0.5):
                        for _ in range(50):
                            await send(socket, "session.update", session=update)
                except (TimeoutError, ConnectionClosed):
                    await asyncio.sleep(0)
    finally:
        socket.transport.abort()


def types_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("conversation.item.") for event in events]


async def refused_upgrade(
    door: Door, query: str = "", **options: Any
) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as raised:
        async with door.connect(query, **options):
            pass
    answer = raised.value.response
    assert answer.headers["x-request-id"]
    return answer.status_code, json.loads(answer.body)["error"]
