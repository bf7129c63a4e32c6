"""Floods of bytes, heads, frames and events: the router lives on, and another client is served.

"Lives on" is the start time of its process: Serve kills a replica whose event loop answers no
health check for six seconds. Most floods need no key; the others have what a browser has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import start_server, stop_server, wait_until
from tests.support.live.realtime_door import opened
from tests.support.router_fakes import make_settings

pytestmark = pytest.mark.slow

FLOOD_S = 8.0  # longer than Serve waits before it kills
ANSWER_S = 60.0
GROWTH_BYTES = 500_000_000  # of the router's memory, in all floods together but
AUDIO = "long audio"  # which is valid, and held until it is transcribed
KEPT_BYTES = 200_000_000  # of that, when the last sessions have ended
HELD_S = 0.25  # five times what is promised of one connection, since machines differ
KEY = "a-key-of-the-client"
TEXT, PING = 0x1, 0x9


class Target:
    """The server as a flood sees it: an address, and a client secret."""

    def __init__(self, url: str) -> None:
        self.url = httpx.URL(url)
        made = httpx.post(
            f"{url}/v1/realtime/client_secrets", headers={"authorization": f"Bearer {KEY}"}
        )
        self.secret = made.json()["value"]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.url.host, self.url.port or 80), timeout=1.0)

    def upgraded(self) -> socket.socket:
        connection = self.connect()
        connection.sendall(
            b"GET /v1/realtime?intent=transcription HTTP/1.1\r\nHost: localhost\r\n"
            b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Authorization: Bearer %b\r\n\r\n" % self.secret.encode()
        )
        assert b" 101 " in connection.recv(4096)
        return connection

    def metric(self, name: str) -> float:
        headers = {"authorization": f"Bearer {KEY}"}
        text = httpx.get(self.url.copy_with(path="/metrics"), headers=headers, timeout=60).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found.group(1))


def frame(kind: int, content: bytes = b"", is_last: bool = True) -> bytes:
    """As a client sends it, masked by zeros."""
    n = len(content)
    if n <= 125:
        size = bytes([0x80 | n])
    else:
        size = b"\xfe" + struct.pack("!H", n) if n < 65_536 else b"\xff" + struct.pack("!Q", n)
    return bytes([kind | (0x80 if is_last else 0)]) + size + bytes(4) + content


def event(**fields: object) -> bytes:
    return frame(TEXT, json.dumps(fields).encode())


def endless(first: bytes, piece: bytes, reads: bool = False) -> Callable[[Target], None]:
    """A flood of one connection after the other, each with `piece` until it is cut."""

    def flood(target: Target) -> None:
        end_s = time.monotonic() + FLOOD_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), target.connect() as connection:
                pour(connection, first, piece, end_s, reads)

    return flood


def framed(piece: bytes, first: bytes = b"", reads: bool = False) -> Callable[[Target], None]:

    def flood(target: Target) -> None:
        end_s = time.monotonic() + FLOOD_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), target.upgraded() as connection:
                pour(connection, first, piece, end_s, reads)

    return flood


def pour(connection: socket.socket, first: bytes, piece: bytes, end_s: float, reads: bool) -> None:
    if reads:
        threading.Thread(target=swallow, args=(connection,), daemon=True).start()
    many = piece * max(1, 65_536 // len(piece))
    connection.sendall(first)
    while time.monotonic() < end_s:
        connection.sendall(many)


def swallow(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while connection.recv(65_536):
            pass


def silent(target: Target) -> None:
    connections = []
    for _ in range(500):
        connections.append(target.connect())
        connections[-1].send(b"GET / HTTP/1.1\r\nHost:")
    time.sleep(FLOOD_S)
    for connection in connections:
        connection.close()


def sessions(target: Target) -> None:
    end_s, opened = time.monotonic() + FLOOD_S, []
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, AssertionError):
            opened.append(target.upgraded())
    for connection in opened:
        connection.close()


def trickled(target: Target) -> None:
    connections = []
    for _ in range(200):
        connections.append(target.connect())
        connections[-1].sendall(SLOW_HEAD)
    for _ in range(round(FLOOD_S)):
        for connection in connections:
            with contextlib.suppress(OSError):  # refused meanwhile
                connection.send(b"-")
        time.sleep(1.0)
    for connection in connections:
        connection.close()


SLOW_HEAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n"
    b"Authorization: Bearer %b\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n"
    % KEY.encode()
)
SECRET_HEAD = (
    b"POST /v1/realtime/client_secrets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000000\r\n"
    b"Content-Type: application/json\r\n"
)
JUNK = b"[" + b"[]," * 200_000 + b"[]]"
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CLEAR = event(type="input_audio_buffer.clear")
FLOODS: dict[str, Callable[[Target], None]] = {
    "a body without a key": endless(SECRET_HEAD + b"\r\n[", b"[],"),
    "a body of one secret": endless(
        SECRET_HEAD + b"Authorization: Bearer %b\r\n\r\n[" % KEY.encode(), b"[],"
    ),
    "a header without end": endless(HEAD + b"X: ", b"a"),
    "headers without end": endless(HEAD, b"a: b\r\n"),
    "a path without end": endless(b"GET /", b"a"),
    "chunks of one byte": endless(
        HEAD.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"
    ),
    "pipelined requests": endless(b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "half a head of many": silent,
    "bodies byte by byte": trickled,
    "sessions": sessions,
    "events": framed(CLEAR, reads=True),
    "events whose answers are not read": framed(CLEAR),
    "pings": framed(frame(PING), reads=True),
    "pings whose answers are not read": framed(frame(PING, bytes(125))),
    "empty fragments": framed(frame(0, b"", False), frame(TEXT, b"a", False)),
    "fragments of a byte": framed(frame(0, b"a", False), frame(TEXT, b"a", False)),
    "long events of junk": framed(frame(TEXT, b'{"type":"x","x":' + JUNK * 20 + b"}"), reads=True),
    "short events of junk": framed(frame(TEXT, b'{"type":"x","x":' + JUNK[:60_000] + b"]}")),
    "a message without end": framed(frame(0, b"a" * 100, False), frame(TEXT, b"a", False)),
    AUDIO: framed(event(type="input_audio_buffer.append", audio="A" * 14_000_000), reads=True),
}

OF_MANY = (silent, trickled, sessions)  # connections


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    env = {"SPLITSCRIBE_ROUTER__API_KEY": f"{KEY},another-key-of-a-client"}
    server = start_server(Path(tmp_path_factory.mktemp("floods")), env=env)
    try:
        yield Target(server.url)
    finally:
        assert stop_server(server) == 0


def text_of(target: Target) -> str:
    client = openai.OpenAI(
        base_url=f"{target.url}/v1", api_key="another-key-of-a-client", timeout=ANSWER_S
    )
    return client.audio.transcriptions.create(model="demo", file=sample_path("short")).text


def test_the_router_lives_on_and_another_client_is_served(
    target: Target, record_property: Callable[[str, int], None]
) -> None:
    record_property("inputs", len(FLOODS))
    before = text_of(target)
    started_s = target.metric("process_start_time_seconds")
    most_bytes = target.metric("process_resident_memory_bytes") + GROWTH_BYTES
    wrong: list[str] = []
    for name, flood in FLOODS.items():
        flooding = [threading.Thread(target=flood, args=(target,)) for _ in range(2)]
        for thread in flooding:
            thread.start()
        waited_s = []
        while any(thread.is_alive() for thread in flooding):
            asked_s = time.monotonic()
            if text_of(target) != before:
                wrong.append(f"{name}: another text")
            waited_s.append(time.monotonic() - asked_s)
        used_bytes = target.metric("process_resident_memory_bytes")
        print(f"{name}: {max(waited_s):.2f} s at most, {used_bytes / 1e6:.0f} MB")
        if target.metric("process_start_time_seconds") != started_s:
            wrong.append(f"{name}: another process")
        if used_bytes > most_bytes and name != AUDIO:
            wrong.append(f"{name}: {used_bytes / 1e6:.0f} MB")
    assert not wrong
    most_kept = most_bytes - GROWTH_BYTES + KEPT_BYTES
    wait_until(
        lambda: target.metric("process_resident_memory_bytes") < most_kept, 120.0, "memory back"
    )


@pytest.mark.parametrize("name", [name for name, flood in FLOODS.items() if flood not in OF_MANY])
async def test_no_connection_holds_the_event_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time of the loop's thread between two turns of another task, in this process."""
    monkeypatch.setattr(f"{__name__}.FLOOD_S", 2.0)
    async with opened(make_settings(api_key=(KEY,))) as door:
        target = await asyncio.to_thread(Target, f"http://127.0.0.1:{door.port}")
        flooding = asyncio.create_task(asyncio.to_thread(FLOODS[name], target))
        held_s, turned_s = 0.0, time.thread_time()
        while not flooding.done():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            held_s, turned_s = max(held_s, now_s - turned_s), now_s
        await flooding
    print(f"{name}: the loop was held for {1e3 * held_s:.0f} ms at most")
    assert held_s < HELD_S
