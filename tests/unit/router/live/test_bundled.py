"""The bundled model live: a recording in pieces gives its words, however late answers are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from cluster.common.messages import (
    SAMPLE_RATE,
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    Pcm,
)
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.settings import LivePolicy
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_text, words_of
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.serve.in_process import LocalEngines, local_engines
from cluster.serve.model_parts import make_live_engine
from router.live.activity import VoiceActivity
from router.live.interface import LiveConfig, TextDelta, TurnCompleted, TurnFailed, TurnSegment
from tests.support.audio.speech import pcm_of, sentences_of
from tests.support.live.virtual_sessions import MANUAL, VAD, Told, at_once, converse
from tests.support.requests import AnyPool

Late = Callable[[int], float]

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class BackgroundEngines:
    """call: runs a coroutine function there, while the caller's loop does nothing else."""

    engines: LocalEngines
    call: Callable[..., Any]


class LatePools(AnyPool):
    """Inside of a virtual loop. late_s: of the nth encode."""

    def __init__(
        self,
        background: BackgroundEngines,
        late_s: Callable[[int], float] = lambda nth: 0.05,
    ) -> None:
        self._call = background.call
        self._encoders = background.engines.pool("encoder")
        self._decoders = background.engines.pool("decoder")
        self._late_s = late_s
        self._encodes = 0

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        self._encodes += 1
        await asyncio.sleep(self._late_s(self._encodes))
        return self._call(self._encoders.encode, request)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        return self._call(self._decoders.decode, request)


def hear(
    background: BackgroundEngines,
    pcm: Pcm,
    config: LiveConfig,
    pools: LatePools,
    policy: LivePolicy = "auto",
) -> Told:
    async def run() -> Told:
        clock = virtual_clock()
        activity = VoiceActivity(sleep=clock.sleep, run=at_once)
        engines = background.engines
        live = engines.settings.router.live.model_copy(update={"policy": policy})
        router = engines.settings.router.model_copy(update={"live": live})
        engine = make_live_engine(
            engines.settings.model_copy(update={"router": router}),
            engines.checkpoint,
            pools,
            pools,
            activity,
            silent_recorder(ROUTER_METRICS),
            clock=clock,
        )
        played: Any = SimpleNamespace(engine=engine, clock=clock)
        told = await converse(played, np.append(pcm, np.zeros(SAMPLE_RATE, np.int16)), config)
        await engine.close()
        await activity.close()
        assert not told.of(TurnFailed)
        return told

    return run_virtually(run())


@pytest.fixture(scope="module")
def background() -> Iterator[BackgroundEngines]:
    settings = load_settings(None, {}, environ={})
    own = next(iter(settings.by_model().values()))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(local_engines(own)) as engines,
    ):
        yield BackgroundEngines(engines, portal.call)


def scattered(most_s: float) -> Late:
    rng = Random(1)
    return lambda nth: rng.uniform(0.0, most_s)


@pytest.mark.parametrize(
    ("name", "n_deltas"), [("short", 5), pytest.param("medium", 20, marks=pytest.mark.slow)]
)
def test_a_recording_in_pieces_gives_its_words(
    background: BackgroundEngines, name: str, n_deltas: int
) -> None:
    """One turn of several sentences, cut in its pauses, told delta by delta, nothing taken back."""
    told = hear(background, pcm_of(name), MANUAL, LatePools(background))
    assert told.texts == {0: sample_text(name).strip()}
    assert len(told.of(TextDelta)) >= n_deltas
    sentences = sentences_of(name)
    segments = told.of(TurnSegment)
    assert [segment.text for segment in segments] == [sentence.text for sentence in sentences]
    for segment, sentence in zip(segments, sentences, strict=True):
        assert abs(segment.start_s - sentence.start) < 0.4
        assert abs(segment.end_s - sentence.end) < 0.4
    first_s, first = next((at, e) for at, e in told.events if isinstance(e, TextDelta))
    assert first_s < sentences[0].end
    assert sentences[0].text.startswith(first.text)


def test_turns_end_in_pauses_and_agreement_gives_the_same_words(
    background: BackgroundEngines,
) -> None:
    told = hear(background, pcm_of("short"), VAD, LatePools(background), "local_agreement")
    turns = [turn.text for turn in told.of(TurnCompleted)]
    assert turns == [sentence.text for sentence in sentences_of("short")]


def test_noise_and_silence_have_no_words(background: BackgroundEngines) -> None:
    hiss = np.random.default_rng(0).normal(0, 300, 6 * SAMPLE_RATE).astype(np.int16)  # -41 dB
    quiet = np.concatenate((np.zeros(4 * SAMPLE_RATE, np.int16), hiss))
    assert hear(background, quiet, MANUAL, LatePools(background)).texts == {}


@pytest.mark.parametrize("config", [MANUAL, VAD], ids=["commit", "vad"])
@pytest.mark.parametrize(
    ("name", "late_s"),
    [
        ("short", lambda nth: 4.0),
        pytest.param("medium", lambda nth: 10.0, marks=pytest.mark.slow),
        pytest.param("medium", scattered(8.0), marks=pytest.mark.slow),
    ],
)
def test_words_do_not_depend_on_how_late_answers_are(
    background: BackgroundEngines, name: str, late_s: Late, config: LiveConfig
) -> None:
    told = hear(background, pcm_of(name), config, LatePools(background, late_s))
    assert words_of(" ".join(told.words)) == words_of(sample_text(name))
