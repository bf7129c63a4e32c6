"""How realtime sessions end: time limits, restarts, crashes, too much audio, slow readers."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from cluster.common.settings import LiveSettings
from router.http.realtime import connection, outbox
from router.live.protocol.events import ClientEvent, Event
from router.live.protocol.session_protocol import LiveProtocol
from tests.support.live.fake_engine import spoken
from tests.support.live.realtime_door import (
    ANSWER_S,
    RATE,
    Door,
    append,
    closed,
    eventually,
    opened,
    read_nothing,
    refused_upgrade,
    send,
    types_of,
    until,
)
from tests.support.router_fakes import make_settings


async def test_the_time_ends_a_session_behind_its_open_turn() -> None:
    live = LiveSettings(max_session_s=1.0)
    async with opened(make_settings(live=live)) as door, door.connect() as socket:
        await append(socket, spoken(5, rate=RATE) + bytes(4800))
        events = await until(socket, "error")
        assert events[-1]["error"]["code"] == "session_expired"
        assert "input_audio_transcription.completed" in types_of(events)
        assert await closed(socket) == 1001
        await door.none_left()


async def test_a_silent_client_is_closed() -> None:
    live = LiveSettings(idle_timeout_s=0.5)
    async with opened(make_settings(live=live)) as door, door.connect() as socket:
        events = await until(socket, "error")
        assert types_of(events) == ["session.created", "error"]
        assert events[-1]["error"]["code"] == "session_idle"


async def test_a_drain_ends_open_turns_and_closes_for_a_restart(door: Door) -> None:
    async with door.connect() as socket, door.connect() as other:
        await append(socket, spoken(5, 6, rate=RATE) + bytes(4800))
        await until(socket, ".delta")
        await until(other, "created")
        draining = asyncio.create_task(door.app.state.realtime.drain())
        events = await until(socket, ".completed")
        assert events[-1]["transcript"] == "w5 w6"
        assert await closed(socket) == await closed(other) == 1012
        await asyncio.wait_for(draining, ANSWER_S)
        assert (await refused_upgrade(door))[0] == 503


async def test_turns_that_do_not_end_in_a_drain_fail(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DRAIN_S", 0.2)
    async with door.connect() as socket:
        await append(socket, spoken(5, rate=RATE) + bytes(4800))
        await until(socket, ".delta")
        door.engine.is_stuck = True
        draining = asyncio.create_task(door.app.state.realtime.drain())
        events = await until(socket, ".failed")
        assert events[-1]["error"]["message"]
        assert await closed(socket) == 1012
        await draining


async def test_a_crash_of_the_engine_ends_every_item_and_says_so(door: Door) -> None:
    async with door.connect() as socket:
        await append(socket, spoken(5, rate=RATE) + bytes(4800))
        await until(socket, ".delta")
        door.engine.crash = RuntimeError("oops")
        await append(socket, spoken(5, rate=RATE))
        events = await until(socket, "error")
        assert types_of(events)[-2:] == ["input_audio_transcription.failed", "error"]
        assert "oops" not in json.dumps(events)
        assert await closed(socket) == 1011
    await door.none_left()


async def test_more_audio_than_may_wait_is_refused_where_the_proxy_queues_it() -> None:
    live = LiveSettings(max_unsent_s=3)
    async with opened(make_settings(live=live), echo_request_id=False) as door:
        door.engine.is_stuck = True
        async with door.connect() as socket:
            for _ in range(4):
                await append(socket, spoken(5, rate=RATE))
            events = await until(socket, "error")
            assert events[-1]["error"]["code"] == "input_audio_buffer_full"
            assert await closed(socket) == 1008
        await door.none_left()


async def test_a_file_that_is_pushed_in_is_read_as_fast_as_there_is_room() -> None:
    """And its client is not idle while it is not read."""
    live = LiveSettings(max_unsent_s=3, idle_timeout_s=0.5)
    async with opened(make_settings(live=live)) as door:
        door.engine.is_stuck = True
        async with door.connect() as socket:
            await send(socket, "session.update", session={})
            await until(socket, "updated")
            for word in range(1, 9):
                await append(socket, spoken(word, rate=RATE))
            session = door.engine.sessions[0]
            await eventually(lambda: session.unsent_s >= 2)
            assert session.unsent_s <= 3
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(until(socket, "error"), 1.0)
            door.engine.is_stuck = False
            session._n = 0
            await append(socket, bytes(4800))
            await send(socket, "input_audio_buffer.commit")
            await until(socket, ".completed")
            assert sum(map(len, session.appended)) > 7.9 * 16_000


async def test_one_long_event_is_taken_and_a_longer_one_is_refused() -> None:
    live = LiveSettings(max_event_bytes=1_200_000)
    async with opened(make_settings(live=live)) as door, door.connect() as socket:
        await append(socket, spoken(*range(1, 16), rate=RATE) + bytes(4800))
        await send(socket, "input_audio_buffer.commit")
        events = await until(socket, ".completed")
        assert events[-1]["transcript"] == " ".join(f"w{i}" for i in range(1, 16))
        await append(socket, spoken(*range(1, 30), rate=RATE))
        (error,) = await until(socket, "error")
        assert error["error"]["code"] == "event_too_large"


async def test_a_client_that_reads_nothing_costs_its_connection_only(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 20_000)
    monkeypatch.setattr(outbox, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "FLUSH_S", 0.2)
    monkeypatch.setattr(connection, "CLOSE_S", 0.2)

    async def is_closed() -> bool:
        return bool(door.engine.sessions) and door.engine.sessions[0].closed

    async with door.connect() as socket:
        await read_nothing(socket, is_closed, 60.0)
    await door.none_left()


async def test_events_that_come_too_fast_are_read_more_slowly_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Valid events, of which one received message holds thousands."""
    monkeypatch.setattr(connection, "EVENTS_AT_ONCE", 50.0)
    monkeypatch.setattr(connection, "EVENTS_PER_S", 400.0)
    async with opened() as door, door.connect() as socket, httpx.AsyncClient() as client:
        await until(socket, "session.created")
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for _ in range(250):
            await send(socket, "input_audio_buffer.clear")
        answer = await client.get(f"http://127.0.0.1:{door.port}/health")
        assert answer.json()["router"]["realtime_sessions"] == 1
        for _ in range(250):
            await until(socket, "input_audio_buffer.cleared")
        assert loop.time() - started_s >= 0.9 * 200 / 400.0


async def test_events_that_come_too_fast_are_refused_where_the_proxy_queues_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "EVENTS_AT_ONCE", 50.0)
    monkeypatch.setattr(connection, "EVENTS_PER_S", 1.0)
    async with opened(echo_request_id=False) as door, door.connect() as socket:
        for _ in range(100):
            await send(socket, "input_audio_buffer.clear")
        events = await until(socket, "error")
        assert events[-1]["error"]["code"] == "too_many_events"
        assert await closed(socket) == 1008
        await door.none_left()


async def test_other_tasks_have_their_turn_within_a_long_event(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = received_at = 0
    pauses = []
    real = LiveProtocol.receive

    def receive(self: LiveProtocol, event: ClientEvent) -> list[Event]:
        nonlocal received_at
        pauses.append(turns - received_at)
        received_at = turns
        return real(self, event)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(LiveProtocol, "receive", receive)
    async with door.connect() as socket:
        await until(socket, "session.created")
        counting = asyncio.create_task(count_turns())
        await append(socket, bytes(60 * 2 * RATE))
        await eventually(lambda: len(pauses) == 6)
        counting.cancel()
    assert all(pauses), "six pieces of 10 s"
