"""The bundled model live, in this process: a recording in pieces gives the file's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import numpy as np
import pytest
import pytest_asyncio

from cluster.common.clock import Clock
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.settings import LivePolicy
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_path
from cluster.serve.in_process import LocalEngines, local_engines
from cluster.serve.model_parts import make_live_engine
from router.live.activity import VoiceActivity
from router.live.interface import LiveConfig, ServerVad, TextDelta, TurnCompleted, TurnSegment
from tests.support.audio.speech import pcm_of, sentences_of
from tests.support.live.virtual_sessions import Told

PIECE = SAMPLE_RATE // 10  # samples that come at once, as clients send them
MANUAL = LiveConfig(language="en", turn_detection=None)
VAD = LiveConfig(language="en", turn_detection=ServerVad())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[LocalEngines]:
    settings = load_settings(None, {}, environ={})
    async with local_engines(next(iter(settings.by_model().values()))) as engines:
        yield engines


async def _hear(
    engines: LocalEngines, pcm: Pcm, config: LiveConfig, policy: LivePolicy = "auto"
) -> Told:
    """Send audio piece by piece, each when all before it was heard; time is that of the audio.

    So what is told does not depend on how fast the machine is.
    """
    now_s = 0.0
    clock = Clock(lambda: now_s, asyncio.sleep, Random(0))
    live = engines.settings.router.live.model_copy(update={"policy": policy})
    router = engines.settings.router.model_copy(update={"live": live})
    activity = VoiceActivity()
    engine = make_live_engine(
        engines.settings.model_copy(update={"router": router}),
        engines.checkpoint,
        engines.pool("encoder"),
        engines.pool("decoder"),
        activity,
        silent_recorder(ROUTER_METRICS),
        clock=clock,
    )
    session = engine.open(config, session_id="live")
    told = Told()

    async def listen() -> None:
        async for event in session.events():
            told.events.append((now_s, event))

    listening = asyncio.ensure_future(listen())
    for first in range(0, pcm.shape[0], PIECE):
        session.append(pcm[first : first + PIECE])
        now_s = first / SAMPLE_RATE
        while session.has_unfinished_work:  # noqa: ASYNC110 - a session has no event for it
            await asyncio.sleep(0.002)
    session.commit()
    await session.drain()
    await listening
    await engine.close()
    await activity.close()
    told.check_ends()
    return told


@pytest.mark.parametrize(
    ("name", "n_deltas"),
    [("short", 5), pytest.param("medium", 20, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_recording_in_pieces_gives_its_words(
    engines: LocalEngines, name: str, n_deltas: int
) -> None:
    """One turn of several sentences, cut in its pauses, told delta by delta, nothing taken back."""
    told = await _hear(engines, pcm_of(name), MANUAL)
    assert told.texts == {0: sample_path(name).with_suffix(".txt").read_text().strip()}
    assert len(told.of(TextDelta)) >= n_deltas
    sentences = sentences_of(name)
    segments = told.of(TurnSegment)
    assert [segment.text for segment in segments] == [sentence.text for sentence in sentences]  # type: ignore[attr-defined]
    for segment, sentence in zip(segments, sentences, strict=True):
        assert abs(segment.start_s - sentence.start) < 0.4  # type: ignore[attr-defined]
        assert abs(segment.end_s - sentence.end) < 0.4  # type: ignore[attr-defined]
    first_s, first = next((at, e) for at, e in told.events if isinstance(e, TextDelta))
    assert first_s < sentences[0].end
    assert sentences[0].text.startswith(first.text)


@pytest.mark.asyncio(loop_scope="module")
async def test_turns_end_in_pauses_and_agreement_gives_the_same_words(
    engines: LocalEngines,
) -> None:
    told = await _hear(engines, pcm_of("short"), VAD, "local_agreement")
    turns = [turn.text for turn in told.of(TurnCompleted)]  # type: ignore[attr-defined]
    assert turns == [sentence.text for sentence in sentences_of("short")]


@pytest.mark.asyncio(loop_scope="module")
async def test_noise_and_silence_have_no_words(engines: LocalEngines) -> None:
    hiss = np.random.default_rng(0).normal(0, 300, 6 * SAMPLE_RATE).astype(np.int16)  # -41 dB
    quiet = np.concatenate((np.zeros(4 * SAMPLE_RATE, np.int16), hiss))
    told = await _hear(engines, quiet, MANUAL)
    assert set(told.texts) == set()
