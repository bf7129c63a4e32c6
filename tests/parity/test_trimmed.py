"""Windows of a trimmed encoder context through both engines, on the bundled checkpoint's speech."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.common.messages import (
    FRAMES_PER_S,
    SAMPLE_RATE,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    Pcm,
    QualityGates,
)
from cluster.common.model.encoder_context import EncoderContext, positions_of
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import LocalEngines, local_engines
from tests.support.audio.speech import pcm_of, sentences_of

ANSWER_S = 60.0
RULE = EncoderContext(64, 30.0)


def sentences() -> list[Pcm]:
    cuts = [(a.end + b.start) / 2 for a, b in itertools.pairwise(sentences_of("medium"))]
    return list(np.split(pcm_of("medium"), [round(at * SAMPLE_RATE) for at in cuts]))


@asynccontextmanager
async def engines(**settings: Any) -> AsyncIterator[LocalEngines]:
    exact = {"dtype": "float32", "device": "cpu"}
    flags = {"encoder": {**exact, "max_batch": 4}, "decoder": exact, **settings}
    async with local_engines(load_settings(None, flags, environ={})) as made:
        yield made


async def transcribe(
    made: LocalEngines,
    index: int,
    pcm: Pcm,
    context: int,
    content_frames: int = 0,
    **options: Any,
) -> DecodeResult:
    encode = EncodeRequest(f"r{index}-{context}", 0, 1, pcm, ANSWER_S, context=context)
    handle = (await asyncio.wrap_future(made.encoder.submit(encode))).handle
    frames = content_frames or frames_of(pcm)
    request = DecodeRequest(
        handle.request_id, 0, 1, handle, DecodeOptions(**{"language": "en", **options}), ANSWER_S,
        content_frames=frames,
    )  # fmt: skip
    return await asyncio.wrap_future(made.decoder.submit(request))


def frames_of(pcm: Pcm) -> int:
    return round(len(pcm) * FRAMES_PER_S / SAMPLE_RATE)


def contexts(windows: list[Pcm]) -> list[int]:
    return [RULE.positions_for(frames_of(pcm), 1500) for pcm in windows]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"page_frames": 125}, marks=pytest.mark.slow),
        pytest.param({"handoff": "encoder_states"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_no_window_s_text_depends_on_its_neighbours(settings: dict[str, Any]) -> None:
    windows = sentences()
    chosen = contexts(windows)
    assert len(set(chosen)) > 1
    chosen[1] = 0
    async with engines(**settings) as made:
        options = [{}, {"language": None}, {"beam_size": 3}, {"words": True}]
        each = [
            (index, pcm, context, options[index % len(options)])
            for index, (pcm, context) in enumerate(zip(windows, chosen, strict=True))
        ]
        alone = [await transcribe(made, i, pcm, n, **more) for i, pcm, n, more in each]
        calls = (transcribe(made, i + 100, pcm, n, **more) for i, pcm, n, more in each)
        together = await asyncio.gather(*calls)
        for one, other, context in zip(alone, together, chosen, strict=True):
            assert other.tokens == one.tokens
            assert (other.language, other.alignment) == (one.language, one.alignment)
            assert other.timings.transfer_bytes == one.timings.transfer_bytes
            assert one.language == "en"
            assert not one.doubted
            if context and "page_frames" not in settings:
                full = alone[1].timings.transfer_bytes
                assert one.timings.transfer_bytes == full * context // 1500
        assert any(result.alignment for result in alone)
        assert made.decoder.stats().doubted == 0


async def test_what_is_not_doubted_is_what_all_positions_give() -> None:
    """Windows that end with their last word: the sentence must not be said again."""
    spans = [
        (round((one.start - 0.1) * SAMPLE_RATE), round((one.end + 0.05) * SAMPLE_RATE))
        for one in sentences_of("medium")
    ]
    async with engines() as made:
        eot = made.decoder._prompts.eot
        for index, (begin, end) in enumerate(spans):
            window = pcm_of("medium")[begin:end]
            n_positions = positions_of(frames_of(window)) + 16
            trimmed = await transcribe(made, index, window, n_positions)
            if trimmed.doubted:
                continue
            full = await transcribe(made, index + 100, window, 0)
            words, expected = ([t for t in r.tokens if t < eot] for r in (trimmed, full))
            assert words == expected, f"window {index} was believed"


@pytest.mark.parametrize("beam_size", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_timestamp_past_the_audio_is_doubted_at_once(beam_size: int) -> None:
    """The decoder is told of less audio than there is: what it hears stands past the end."""
    pcm, ladder = sentences()[0], (0.0, 0.4, 0.8)
    options = {"temperatures": ladder, "words": True, "beam_size": beam_size}
    async with engines() as made:
        trusted = await transcribe(made, 0, pcm, 256, **options)
        doubted = await transcribe(made, 1, pcm, 256, content_frames=100, **options)
        full = await transcribe(made, 2, pcm, 0, content_frames=100, **options)
        assert (trusted.doubted, doubted.doubted, full.doubted) == (False, True, False)
        assert doubted.tokens == trusted.tokens
        assert (doubted.attempt, doubted.alignment) == (0, None)
        assert trusted.alignment is not None
        assert made.decoder.stats().doubted == 1


async def test_a_first_attempt_that_fails_is_doubted_not_tried_again() -> None:
    options = {"temperatures": (0.0, 0.4), "gates": QualityGates(avg_logprob=0.0)}
    async with engines() as made:
        trimmed = await transcribe(made, 0, sentences()[0], 256, **options)
        assert (trimmed.doubted, trimmed.attempt) == (True, 0)
        assert made.decoder.stats().fallbacks == 0
        full = await transcribe(made, 1, sentences()[0], 0, **options)
        assert (full.doubted, full.attempt) == (False, 1)


async def test_a_sampled_attempt_that_fails_goes_up_the_ladder() -> None:
    """It is as uncertain with all positions: another encode would change nothing."""
    options = {"temperatures": (0.4, 0.6), "gates": QualityGates(avg_logprob=0.0), "seed": 1}
    async with engines() as made:
        trimmed = await transcribe(made, 0, sentences()[0], 256, **options)
        assert (trimmed.doubted, trimmed.attempt) == (False, 1)
        late = await transcribe(made, 1, sentences()[0], 256, content_frames=100, **options)
        assert (late.doubted, late.attempt) == (True, 0), "a timestamp past the audio"


async def test_what_would_be_left_out_as_silence_is_doubted() -> None:
    """Gates that take every window for silence: a short context alone never decides that."""
    every = QualityGates(avg_logprob=0.0, no_speech_prob=0.0)
    async with engines() as made:
        for gates in (every, replace(every, avg_logprob=None)):
            trimmed = await transcribe(made, 0, sentences()[0], 256, gates=gates)
            full = await transcribe(made, 1, sentences()[0], 0, gates=gates)
            assert (trimmed.doubted, full.doubted) == (True, False)
