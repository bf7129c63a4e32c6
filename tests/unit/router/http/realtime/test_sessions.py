"""The realtime endpoint over real sockets: upgrades, keys, limits, events, and how it ends."""

from __future__ import annotations

import json

import pytest
from websockets.exceptions import InvalidStatus

from cluster.common.metrics import ROUTER_METRICS
from cluster.common.settings import LiveSettings
from tests.support.live.fake_engine import BAD, spoken
from tests.support.live.realtime_door import RATE, Door, append, opened, send, types_of, until
from tests.support.router_fakes import make_settings
from tests.support.workers.counted import Counted


@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_turn_is_told_from_its_start_to_its_completion(door: Door, pieces: int) -> None:
    async with door.connect() as socket:
        (created,) = await until(socket, "session.created")
        assert created["session"]["type"] == "transcription"
        session = {"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}
        await send(socket, "session.update", session=session)
        audio = spoken(5, 6, 0, rate=RATE) + bytes(4800)
        size = len(audio) // pieces + 1
        for start in range(0, len(audio), size):
            await append(socket, audio[start : start + size])
        events = await until(socket, ".completed")
    assert types_of(events) == [
        "session.updated",
        "input_audio_buffer.speech_started",
        "input_audio_transcription.delta",
        "input_audio_transcription.delta",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "added",
        "done",
        "input_audio_transcription.completed",
    ]
    assert events[2]["logprobs"][0]["logprob"] == -0.5
    assert events[-1]["transcript"] == "w5 w6"
    assert events[-1]["usage"] == {"type": "duration", "seconds": 2.0}
    assert events[-1]["languages"] == [{"code": "en"}]
    items = {event.get("item_id") or event["item"]["id"] for event in events[1:]}
    assert len(items) == 1
    assert len({event["event_id"] for event in events}) == len(events)
    await door.none_left()


async def test_events_are_answered_in_their_order(door: Door) -> None:
    """A client may take the answer to its update as a sign that its commit was done."""
    async with door.connect() as socket:
        await until(socket, "session.created")
        for _ in range(20):
            await append(socket, bytes(48_000))
            for event in (
                {"type": "input_audio_buffer.commit"},
                {"type": "session.update", "session": {"type": "transcription"}},
            ):
                socket.protocol.send_text(json.dumps(event).encode())
            socket.transport.write(b"".join(socket.protocol.data_to_send()))  # both at once
            told = types_of(await until(socket, "session.updated"))
            assert "input_audio_buffer.committed" in told


async def test_a_failed_turn_and_wrong_events_leave_the_session_open(door: Door) -> None:
    async with door.connect() as socket:
        await append(socket, spoken(5, BAD, 0, rate=RATE) + bytes(4800))
        events = await until(socket, ".failed")
        assert events[-1]["error"]["message"] == "the worker is gone"
        for wrong in ("{", "[]", b"\x00", '{"type": "response.create", "event_id": "mine"}'):
            await socket.send(wrong)
            (error,) = await until(socket, "error")
            assert error["error"]["type"] == "invalid_request_error"
        assert "'session.update'" in error["error"]["message"]
        await append(socket, spoken(7, 0, rate=RATE) + bytes(4800))
        assert (await until(socket, ".completed"))[-1]["transcript"] == "w7"


# ---- How many realtime sessions there are, and which were refused, is in the router's metrics.


async def test_open_and_refused_sessions_are_counted() -> None:
    counted = Counted(ROUTER_METRICS)
    settings = make_settings(live=LiveSettings(max_sessions=1))
    async with opened(settings, recorder=counted.recorder) as door:
        realtime = door.app.state.realtime
        async with door.connect() as socket:
            await until(socket, "session.created")
            realtime.report()
            assert counted.of("splitscribe_live_sessions")[-1] == 1
            with pytest.raises(InvalidStatus):
                async with door.connect():
                    pass
        await door.none_left()
        with pytest.raises(InvalidStatus):
            async with door.connect("?intent=conversation"):
                pass
        realtime.report()
    assert counted.of("splitscribe_live_sessions")[-1] == 0
    refused = counted.of("splitscribe_live_refused_total", code="rate_limit_exceeded")
    assert refused == [1.0], "a wrong intent is no want of room"
