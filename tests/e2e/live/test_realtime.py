"""Live sessions on a real cluster: OpenAI's Python SDK through each door that people use."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import jiwer
import pytest
import soxr
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import sample_text, words_of
from tests.e2e.conftest import Server, serving, start_server, stop_server, wait_until
from tests.support.audio.speech import pcm_of
from tests.support.live.realtime_door import append, closed, read_nothing, until

RATE = 24_000
PIECE = RATE // 10  # samples
HEARD_S = 60.0
MOST_WRONG = 0.25  # of the words: turns are cut elsewhere than a file's windows
DOORS = [("router", "1"), ("serve", "1"), ("serve", "0")]
BEHIND_SERVE = {"SPLITSCRIBE_ROUTER__LISTENER": "serve"}
STOPPED = {
    "router": {"SPLITSCRIBE_ROUTER__LISTENER": "router"},
    "serve": BEHIND_SERVE,
    "serve-default": BEHIND_SERVE | {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"},
    "serve-haproxy": BEHIND_SERVE | {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
}


def pcm_24_khz(name: str = "short", silence_s: float = 1.5) -> bytes:
    pcm = soxr.resample(pcm_of(name), SAMPLE_RATE, RATE)
    return pcm.tobytes() + bytes(2 * round(silence_s * RATE))


async def hear_by_the_sdk(
    server: Server, model: str, turn_detection: dict[str, str] | None
) -> None:
    """Push the short recording in, and read until its text is there; the deltas must spell it."""
    pcm = pcm_24_khz()
    async with server.async_client().realtime.connect(
        extra_query={"intent": "transcription"}
    ) as connection:
        transcription = {"model": model, "language": "en"}
        audio_input = {"transcription": transcription, "turn_detection": turn_detection}
        session: Any = {"type": "transcription", "audio": {"input": audio_input}}
        await connection.session.update(session=session)
        for start in range(0, len(pcm), 2 * PIECE):
            audio = base64.b64encode(pcm[start : start + 2 * PIECE]).decode()
            await connection.input_audio_buffer.append(audio=audio)
        if turn_detection is None:
            await connection.input_audio_buffer.commit()
        texts: list[str] = []
        deltas: dict[str, str] = {}
        try:
            async with asyncio.timeout(HEARD_S):
                async for event in connection:
                    assert not event.type.endswith(("error", ".failed")), event
                    if event.type.endswith(".delta"):
                        deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
                    elif event.type.endswith(".completed"):
                        assert deltas.get(event.item_id, "") == event.transcript
                        texts.append(event.transcript)
                        if wrong_share(" ".join(texts)) <= MOST_WRONG:
                            return
        except TimeoutError:
            pass
    raise AssertionError(f"heard {texts} for {sample_text('short')!r}")


def wrong_share(heard: str) -> float:
    return float(jiwer.wer(*(" ".join(words_of(one)) for one in (sample_text("short"), heard))))


@pytest.mark.slow
@pytest.mark.parametrize("turns", [None, {"type": "server_vad"}], ids=["client", "server"])
async def test_openais_sdk_hears_a_recording(server: Server, turns: dict[str, str] | None) -> None:
    await hear_by_the_sdk(server, "gpt-4o-transcribe", turns)
    await asyncio.to_thread(wait_until, server.is_idle, 30, "every page is back")


@pytest.fixture(scope="module", params=DOORS, ids=["router", "serve", "serve-default"])
def door(
    request: pytest.FixtureRequest, kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    listener, optimised = request.param
    env = {
        "SPLITSCRIBE_ROUTER__LISTENER": listener,
        "SPLITSCRIBE_ROUTER__LIVE__MAX_SESSIONS": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": optimised,
    }
    with serving(tmp_path_factory.mktemp("cwd"), env=env) as running:
        yield running


def address(server: Server) -> str:
    return server.url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"


def no_session_is_open(server: Server) -> bool:
    return bool(server.health()["router"]["realtime_sessions"] == 0)


@pytest.mark.slow
async def test_every_door_carries_a_session(door: Server) -> None:
    await hear_by_the_sdk(door, "whisper-1", None)
    await asyncio.to_thread(wait_until, lambda: no_session_is_open(door), 30, "the session ends")


@pytest.mark.slow
async def test_every_door_says_429_before_the_upgrade(door: Server) -> None:
    async with connect(address(door)) as socket:
        await until(socket, "session.created")
        with pytest.raises(InvalidStatus) as refused:
            async with connect(address(door)):
                pass
        answer = refused.value.response
        assert answer.status_code == 429
        assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
    await asyncio.to_thread(wait_until, lambda: no_session_is_open(door), 30, "the session ends")


@pytest.mark.slow
async def test_who_vanishes_frees_the_place(door: Server) -> None:
    async with connect(address(door)) as socket:
        await append(socket, pcm_24_khz())
        await until(socket, ".delta")
        socket.transport.abort()
    await asyncio.to_thread(wait_until, lambda: no_session_is_open(door), 60, "the session ends")
    await asyncio.to_thread(wait_until, door.is_idle, 60, "every page is back")


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_closed(door: Server) -> None:
    socket = await connect(address(door), ping_interval=None, close_timeout=1)
    await read_nothing(socket, lambda: asyncio.to_thread(no_session_is_open, door), 240)


@pytest.mark.slow
@pytest.mark.parametrize("environment", STOPPED.values(), ids=STOPPED)
async def test_a_stop_ends_open_turns_and_says_1012(
    environment: dict[str, str], kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cwd")
    running = await asyncio.to_thread(start_server, folder, env=environment)
    stopping: asyncio.Future[int] | None = None
    try:
        async with connect(address(running)) as socket:
            await append(socket, pcm_24_khz(silence_s=0.0))
            await until(socket, ".delta")
            stopping = asyncio.ensure_future(asyncio.to_thread(stop_server, running))
            await until(socket, ".completed", ".failed")
            assert await closed(socket) == 1012
    finally:
        status = await (stopping or asyncio.to_thread(stop_server, running))
    assert status == 0, running.output()[-4000:]
