"""The realtime endpoint over real sockets: upgrades, keys, limits, events, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cluster.settings import LiveSettings
from router.http.realtime import connection, outbox
from tests.support.live.fake_engine import BAD, spoken
from tests.support.live.realtime_door import (
    ANSWER_S,
    RATE,
    Door,
    append,
    eventually,
    opened,
    send,
    types_of,
    until,
)
from tests.support.router_fakes import make_settings


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with opened() as made:
        yield made


@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_turn_is_told_from_its_start_to_its_completion(door: Door, pieces: int) -> None:
    async with door.connect() as socket:
        (created,) = await until(socket, "session.created")
        assert created["session"]["type"] == "transcription"
        await send(socket, "session.update", session={"type": "transcription"})
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


async def test_openais_sdk_talks_to_it_as_to_openai(door: Door) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{door.port}/v1", api_key="none")
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": RATE},
                        "transcription": {"model": "gpt-realtime-whisper", "language": "en"},
                        "turn_detection": None,
                    }
                },
                "include": ["item.input_audio_transcription.logprobs"],
            }
        )
        audio = base64.b64encode(spoken(5, 6, rate=RATE)).decode()
        await connection.input_audio_buffer.append(audio=audio)
        await connection.input_audio_buffer.commit()
        events = []
        async with asyncio.timeout(ANSWER_S):
            async for event in connection:
                events.append(event)
                if event.type.endswith(".completed"):
                    break
    updated = events[1]
    assert updated.type == "session.updated"
    assert updated.session.audio.input.turn_detection is None
    assert updated.session.audio.input.transcription.model == "gpt-realtime-whisper"
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert "".join(event.delta for event in deltas) == events[-1].transcript == "w5 w6"
    assert deltas[0].logprobs[0].logprob == -0.5
    await door.none_left()


async def test_the_beta_is_answered_in_its_own_words(door: Door) -> None:
    headers = {"OpenAI-Beta": "realtime=v1"}
    async with door.connect(additional_headers=headers) as socket:
        session = {"input_audio_format": "g711_ulaw", "turn_detection": {"type": "server_vad"}}
        await send(socket, "transcription_session.update", session=session)
        await append(socket, bytes([0x10]) * 8000 + bytes([0xFF]) * 9600)
        events = await until(socket, ".completed")
        assert types_of(events)[:2] == [
            "transcription_session.created",
            "transcription_session.updated",
        ]
        assert events[1]["session"]["input_audio_format"] == "g711_ulaw"
        assert "created" in types_of(events)
        # A commit after the server's own turn detection has taken everything gets an answer.
        await send(socket, "input_audio_buffer.commit")
        assert (await until(socket, ".completed"))[-1]["transcript"] == ""


async def test_a_failed_turn_and_wrong_events_leave_the_session_open(door: Door) -> None:
    async with door.connect() as socket:
        await append(socket, spoken(5, BAD, 0, rate=RATE) + bytes(4800))
        events = await until(socket, ".failed")
        assert events[-1]["error"]["message"] == "the worker is gone"
        for wrong in ("{", "[]", '{"type": "response.create", "event_id": "mine"}', b"\x00"):
            await socket.send(wrong)
            (error,) = await until(socket, "error")
            assert error["error"]["type"] == "invalid_request_error"
        await append(socket, spoken(7, 0, rate=RATE) + bytes(4800))
        assert (await until(socket, ".completed"))[-1]["transcript"] == "w7"


async def test_who_sends_nothing_but_mistakes_is_closed(door: Door) -> None:
    async with door.connect() as socket:
        for _ in range(101):
            await socket.send("{")
        with pytest.raises(ConnectionClosed):
            await until(socket, "never")
    assert socket.close_code == 1008
    await door.none_left()


# ---- who may come in ----


async def refusal(door: Door, query: str = "", **options: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as raised:
        async with door.connect(query, **options):
            pass
    answer = raised.value.response
    assert answer.headers["x-request-id"]
    return answer.status_code, json.loads(answer.body)["error"]


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


def offered(key: str) -> dict[str, Any]:
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{key}"]}


@pytest.mark.parametrize("way", [bearer, offered])
async def test_keys_come_by_header_or_by_sub_protocol(
    way: Callable[[str], dict[str, Any]],
) -> None:
    async with opened(make_settings(api_key=("sesame",))) as door:
        async with door.connect(**way("sesame")) as socket:
            await until(socket, "session.created")
            assert socket.subprotocol == ("realtime" if way is offered else None)
        status, error = await refusal(door, **way("wrong"))
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert (await refusal(door))[0] == 401
        assert not door.app.state.realtime.sessions


async def test_unknown_models_and_intents_are_refused_before_the_upgrade(door: Door) -> None:
    status, error = await refusal(door, "?model=whisper-99")
    assert (status, error["code"]) == (404, "model_not_found")
    assert (await refusal(door, "?intent=conversation"))[0] == 400
    door.engine.is_full = True
    assert (await refusal(door))[0] == 503
    async with httpx.AsyncClient() as client:
        answer = await client.get(door.url("").replace("ws:", "http:"))
    assert answer.status_code == 426
    assert not door.app.state.realtime.sessions


async def test_too_many_sessions_get_a_429_before_the_upgrade() -> None:
    live = LiveSettings(max_sessions=2, max_sessions_per_key=1)
    async with opened(make_settings(api_key=("one", "two", "three"), live=live)) as door:
        async with door.connect(**bearer("one")):
            status, error = await refusal(door, **bearer("one"))
            assert (status, error["type"]) == (429, "requests")
            async with door.connect(**bearer("two")):
                assert (await refusal(door, **bearer("three")))[0] == 429
        await door.none_left()
        async with door.connect(**bearer("three")) as socket:
            await until(socket, "session.created")


async def test_foreign_pages_are_refused_where_no_key_says_who_they_are() -> None:
    async with opened(make_settings(cors_origins=("https://app.example",))) as door:
        status, error = await refusal(door, origin="https://evil.example")
        assert (status, error["code"]) == (403, "origin_not_allowed")
        for origin in ("https://app.example", f"http://127.0.0.1:{door.port}"):
            async with door.connect(origin=origin) as socket:
                await until(socket, "session.created")


# ---- client secrets ----


async def test_a_client_secret_opens_sessions_as_it_was_made_on_any_router() -> None:
    settings = make_settings(api_key=("sesame",), live=LiveSettings(max_sessions_per_key=1))
    session = {
        "type": "transcription",
        "audio": {"input": {"transcription": {"language": "de"}, "turn_detection": None}},
    }
    key = {"Authorization": "Bearer sesame"}
    async with (
        opened(settings, cluster_key="k") as door,
        opened(settings, cluster_key="k") as other,
    ):
        assert (await door.post("client_secrets")).status_code == 401
        made = (await door.post("client_secrets", {"session": session}, headers=key)).json()
        assert made["value"].startswith("ek_")
        assert 590 < made["expires_at"] - time.time() <= 600
        assert made["session"]["audio"]["input"]["turn_detection"] is None
        async with other.connect(**offered(made["value"])) as socket:
            (created,) = await until(socket, "session.created")
            assert created["session"]["audio"]["input"]["transcription"]["language"] == "de"
            assert other.engine.sessions[0].config.language == "de"
            assert (await refusal(other, **bearer("sesame")))[0] == 429, "it counts as the key"
        secret = {"Authorization": f"Bearer {made['value']}"}
        answer = await door.post("client_secrets", headers=secret)
        assert answer.status_code == 401, "a secret makes no secrets"
        value = made["value"]
        forged = value[:10] + ("A" if value[10] != "A" else "B") + value[11:]
        assert (await refusal(other, **bearer(forged)))[0] == 401
    async with opened(settings, cluster_key="another") as stranger:
        assert (await refusal(stranger, **bearer(made["value"])))[0] == 401


async def test_wrong_secrets_are_refused_with_the_fields_name(door: Door) -> None:
    wrong = {"audio": {"input": {"turn_detection": {"type": "magic"}}}}
    answer = await door.post("client_secrets", {"session": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "session.audio.input.turn_detection.type"
    answer = await door.post("client_secrets", {"expires_after": {"seconds": 5}})
    assert answer.status_code == 400
    prompt = "".join(chr(0x4E00 + i * 7 % 9999) for i in range(9000))
    answer = await door.post(
        "client_secrets", {"session": {"audio": {"input": {"transcription": {"prompt": prompt}}}}}
    )
    assert answer.json()["error"]["code"] == "string_above_max_length"


async def test_the_beta_makes_secrets_in_its_own_shape(door: Door) -> None:
    body = {"input_audio_format": "g711_alaw", "client_secret": {"expires_at": {"seconds": 20}}}
    made = (await door.post("transcription_sessions", body)).json()
    assert made["input_audio_format"] == "g711_alaw"
    async with door.connect(**bearer(made["client_secret"]["value"])) as socket:
        (created,) = await until(socket, "session.created")
        assert created["session"]["audio"]["input"]["format"] == {"type": "audio/pcma"}


# ---- limits and ends ----


async def test_the_time_warns_and_then_ends_a_session() -> None:
    live = LiveSettings(max_session_s=1.0)
    async with opened(make_settings(live=live)) as door, door.connect() as socket:
        await append(socket, spoken(5, rate=RATE) + bytes(4800))
        events = await until(socket, "error")
        assert events[-1]["error"]["code"] == "session_expired"
        assert "session.expiring" in types_of(events)
        assert "input_audio_transcription.completed" in types_of(events)
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1001
        await door.none_left()


async def test_a_silent_client_is_warned_and_closed() -> None:
    live = LiveSettings(idle_timeout_s=0.5)
    async with opened(make_settings(live=live)) as door, door.connect() as socket:
        events = await until(socket, "error")
        assert events[1]["reason"] == "idle"
        assert events[-1]["error"]["code"] == "session_idle"


async def test_a_drain_ends_open_turns_and_closes_for_a_restart(door: Door) -> None:
    async with door.connect() as socket, door.connect() as other:
        await append(socket, spoken(5, 6, rate=RATE) + bytes(4800))
        await until(socket, ".delta")
        await until(other, "created")
        draining = asyncio.create_task(door.app.state.realtime.drain())
        events = await until(socket, ".completed")
        assert events[-1]["transcript"] == "w5 w6"
        for each in (socket, other):
            with pytest.raises(ConnectionClosed):
                await until(each, "never")
            assert each.close_code == 1012
        await asyncio.wait_for(draining, ANSWER_S)
        assert (await refusal(door))[0] == 503


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
        with pytest.raises(ConnectionClosed):
            await until(socket, "never")
        assert socket.close_code == 1012
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
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    assert socket.close_code == 1011
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
            with pytest.raises(ConnectionClosed):
                await until(socket, "never")
            assert socket.close_code == 1008
        await door.none_left()


async def test_a_file_that_is_pushed_in_is_read_as_fast_as_there_is_room() -> None:
    live = LiveSettings(max_unsent_s=3)
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
    """It sends clears and never reads their answers."""
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 20_000)
    monkeypatch.setattr(outbox, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "FLUSH_S", 0.2)
    monkeypatch.setattr(connection, "CLOSE_S", 0.2)
    _, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1024)
    writer.transport.pause_reading()
    head = (
        "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    writer.write(head.encode())
    clear = b'{"type":"input_audio_buffer.clear"}'
    frame = bytes([0x81, 0x80 | len(clear)]) + bytes(4) + clear
    async with asyncio.timeout(60):
        while not door.engine.sessions or not door.engine.sessions[0].closed:
            writer.write(frame * 1000)
            try:
                await asyncio.wait_for(writer.drain(), 0.2)
            except (TimeoutError, OSError):
                await asyncio.sleep(0)
    await door.none_left()
    writer.transport.abort()


async def test_health_counts_the_sessions(door: Door) -> None:
    async with door.connect(), httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{door.port}/health")
        assert answer.json()["router"]["realtime_sessions"] == 1
