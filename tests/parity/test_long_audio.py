"""Minutes of speech in parallel mode: windows hold each word once, and cost no accuracy.

By the demo model's own voices (espeak-ng and flite). `-s` shows the figures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import pytest_asyncio
from rich.console import Console
from rich.table import Table

from benchmark.shared.word_errors import WordErrors, total
from cluster.common.messages import Pcm
from router.api.params import SequentialOptions, TranscriptionParams
from router.audio.cutter import WindowCutter
from router.audio.vad import SpeechDetector
from router.audio.windows import Window
from router.transcriber import RequestTranscriber
from router.transcript import Transcript
from tests.support.audio.long_recordings import (
    Recording,
    Sentence,
    errors_by_sentence,
    long_set,
    make_recording,
    missing_voices,
)
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
WORDS_AT_A_CUT = {  # lost or doubled beyond what is lost and added elsewhere
    "paused": 0.25,
    "glued": 1.5,  # inside a sentence: the demo model has only heard windows that end with one
}
CUT_S = 0.3  # a sentence so close to a cut is at it


@pytest.fixture(scope="module", autouse=True)
def _voices() -> None:
    if problem := missing_voices():
        pytest.skip(problem)


# --------------------------------------------------------------------------------- windows


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


# ----------------------------------------------------------------------------------- words


@dataclass(frozen=True, slots=True)
class Heard:
    recording: Recording
    transcript: Transcript

    @property
    def errors(self) -> list[WordErrors]:
        return errors_by_sentence(self.recording, self.transcript.text)

    @property
    def cuts_s(self) -> list[float]:
        """Where windows began, and what of them was decoded again."""
        return sorted({segment.seek / 100 for segment in self.transcript.segments} - {0.0})

    def is_at_cut(self, sentence: Sentence) -> bool:
        first, last = sentence.start - CUT_S, sentence.end + CUT_S
        return any(first <= at_s <= last for at_s in self.cuts_s)

    def total(self, *, at_cuts: bool) -> WordErrors:
        pairs = zip(self.recording.sentences, self.errors, strict=True)
        return total(errors for one, errors in pairs if self.is_at_cut(one) == at_cuts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber() as transcriber:
        yield transcriber


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def heard(
    transcriber: RequestTranscriber, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Heard]]:
    folder = tmp_path_factory.mktemp("long")
    recordings = long_set()
    found = {
        mode: [
            Heard(recording, (await ours(transcriber, params, recording.pcm, folder)).transcript)
            for recording in recordings
        ]
        for mode, params in MODES.items()
    }
    show(found)
    return found


def show(found: dict[str, list[Heard]]) -> None:
    table = Table(title="word error rates of long recordings, in %", title_justify="left")
    for column in ("recording", *found):
        table.add_column(column)
    for row in zip(*found.values(), strict=True):
        table.add_row(row[0].recording.name, *(f"{total(one.errors).wer:.2f}" for one in row))
    sums = {mode: total(total(one.errors) for one in all_) for mode, all_ in found.items()}
    table.add_row("all", *(f"{errors.wer:.2f}" for errors in sums.values()))
    Console(width=150).print("", table)
    for mode, all_ in found.items():
        n_cuts = sum(len(one.cuts_s) for one in all_)
        at_cuts, elsewhere = (total(o.total(at_cuts=at) for o in all_) for at in (True, False))
        print(f"{mode}: {n_cuts} cuts, at them {at_cuts}, elsewhere {elsewhere}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_parallel_mode_is_as_accurate_as_sequential_mode(
    heard: dict[str, list[Heard]],
) -> None:
    rates = {mode: total(total(o.errors) for o in all_).wer for mode, all_ in heard.items()}
    assert rates["parallel"] <= min(rates.values()) + WER_POINTS, rates


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", WORDS_AT_A_CUT)
async def test_no_words_are_lost_or_doubled_at_cuts(
    heard: dict[str, list[Heard]], kind: str
) -> None:
    mine = [one for one in heard["parallel"] if one.recording.name.startswith(kind)]
    at_cuts, elsewhere = (total(one.total(at_cuts=at) for one in mine) for at in (True, False))
    usual = (elsewhere.deletions + elsewhere.insertions) / elsewhere.words
    n_more = at_cuts.deletions + at_cuts.insertions - usual * at_cuts.words
    assert n_more <= WORDS_AT_A_CUT[kind] * sum(len(one.cuts_s) for one in mine), (
        at_cuts,
        elsewhere,
    )
