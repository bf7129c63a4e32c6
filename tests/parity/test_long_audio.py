"""Minutes of speech in parallel mode: windows hold each word once, and cost no accuracy.

By the demo model's own voices (espeak-ng and flite). `-s` shows the figures. Glued: nobody pauses
between two sentences, and cuts have to fall into speech.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import ExampleMaker
from benchmark.shared.speech.synthesis import (
    EDGE_FRAMES,
    FRAME_S,
    Manner,
    SynthesisError,
    speak,
)
from benchmark.shared.speech.wav import to_pcm
from benchmark.shared.word_errors import WordErrors, count_errors, total
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.demo.samples import words_of
from router.api.params import SequentialOptions, TranscriptionParams
from router.audio.cutter import WindowCutter
from router.audio.vad import SpeechDetector
from router.audio.windows import Window
from router.transcriber import RequestTranscriber
from tests.support.audio.speech import Sentence
from tests.support.references.transcribers import float32_transcriber, ours

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARALLEL = TranscriptionParams(model="demo", language="en", seed=0)
SEQUENTIAL = replace(PARALLEL, decoding="sequential")
MODES = {
    "parallel": PARALLEL,
    "sequential": SEQUENTIAL,
    "sequential, unconditioned": replace(
        SEQUENTIAL, sequential=SequentialOptions(condition_on_previous_text=False)
    ),
}
WER_POINTS = 0.3  # by which parallel mode may be worse
EDGE_S = EDGE_FRAMES * FRAME_S  # around each sentence: all that stays of a pause that is glued
PAUSES_S = (0.1, 0.9)
PAUSED_S, GLUED_S = (60.0, 120.0, 180.0, 300.0), (90.0, 150.0, 240.0)


@pytest.fixture(scope="module", autouse=True)
def _voices() -> None:
    for voice in ("en-us", "slt"):
        try:
            speak("Hello.", Manner(voice, 175, 50, 1.0, 1.0))
        except SynthesisError as error:
            pytest.skip(str(error))


@dataclass(frozen=True, slots=True)
class Recording:
    """pcm: int16 [n_samples], 16 kHz."""

    name: str
    pcm: Pcm
    sentences: tuple[Sentence, ...]


def make_recording(seconds: float, *, glued: bool = False) -> Recording:
    name = f"{'glued' if glued else 'paused'}, {seconds:g} s"
    maker = ExampleMaker(f"long/{name}")
    pieces, sentences, end_s = [], [], 0.0
    while end_s < seconds:
        example = maker.several(corpus.sentence, (0.0, 0.0) if glued else PAUSES_S)
        first_s, last_s = 0.0, len(example.audio) / SAMPLE_RATE
        if glued:
            first_s, last_s = example.segments[0][0] - EDGE_S, example.segments[-1][1] + EDGE_S
        piece = example.audio[round(first_s * SAMPLE_RATE) : round(last_s * SAMPLE_RATE)]
        shift_s = end_s - first_s
        sentences += [Sentence(text, s + shift_s, e + shift_s) for s, e, text in example.segments]
        pieces.append(piece)
        end_s += len(piece) / SAMPLE_RATE
    return Recording(name, to_pcm(np.concatenate(pieces)), tuple(sentences))


def cut(pcm: Pcm) -> list[Window]:
    cutter = WindowCutter(SpeechDetector())
    found = [*cutter.feed(pcm), *cutter.finish()]
    return [window for window in found if window is not None]


@pytest.mark.parametrize("glued", [False, True])
@pytest.mark.parametrize("seconds", [70.0, pytest.param(240.0, marks=pytest.mark.slow)])
async def test_each_sentence_is_in_the_windows_once(seconds: float, glued: bool) -> None:
    """Whole or, where nobody pauses, in two windows that touch."""
    recording = make_recording(seconds, glued=glued)
    windows = cut(recording.pcm)
    assert all(left.end_s <= right.start_s for left, right in pairwise(windows))
    for sentence in recording.sentences:
        assert_covered(sentence, windows)


def assert_covered(sentence: Sentence, windows: list[Window]) -> None:
    at_s = sentence.start
    for window in windows:
        if window.start_s <= at_s < window.end_s:
            at_s = window.end_s
    assert at_s >= sentence.end, f"{sentence} is lost from {at_s:.2f} s on"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber() as transcriber:
        yield transcriber


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_parallel_mode_is_as_accurate_as_sequential_mode(
    transcriber: RequestTranscriber, tmp_path: Path
) -> None:
    """What is lost or doubled where windows are cut would be missing here."""
    errors: dict[str, list[WordErrors]] = {mode: [] for mode in MODES}
    recordings = [make_recording(seconds) for seconds in PAUSED_S]
    recordings += [make_recording(seconds, glued=True) for seconds in GLUED_S]
    for recording in recordings:
        said = " ".join(word for one in recording.sentences for word in words_of(one.text))
        for mode, params in MODES.items():
            answer = await ours(transcriber, params, recording.pcm, tmp_path)
            heard = " ".join(words_of(answer.transcript.text))
            errors[mode].append(count_errors(said, heard))
            print(f"{recording.name}, {mode}: {errors[mode][-1]}")
    rates = {mode: total(found).wer for mode, found in errors.items()}
    assert rates["parallel"] <= min(rates.values()) + WER_POINTS, rates
