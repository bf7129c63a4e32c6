"""Windows cover all speech, in order, at most 30 s each, cut in pauses, at true offsets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES, Pcm
from router.audio.cutter import WindowCutter
from router.audio.vad import FRAME_SAMPLES, SpeechDetector, VadOptions, runs, speech_mask
from router.audio.windows import Window
from tests.support.audio.sounds import espeak, joined, silence, voice

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
TEXT = "Yes. Seven green birds are singing in the garden near my house. No, wait, stop"


class LoudnessDetector:
    """Takes what is loud for speech: exact, so that properties can be."""

    def __init__(self, certainty: float = 0.9) -> None:
        self.options = VadOptions()
        self.certainty = certainty

    def stream(self, peak: int = 0) -> LoudnessDetector:
        return self

    def feed(self, pcm: Pcm) -> NDArray[np.float32]:
        padded = np.zeros(-(-pcm.shape[0] // FRAME_SAMPLES) * FRAME_SAMPLES)
        padded[: pcm.shape[0]] = np.abs(pcm.astype(np.int32))
        loud = padded.reshape(-1, FRAME_SAMPLES).max(axis=1) > 100
        return np.where(loud, self.certainty, 0.0).astype(np.float32)


@pytest.fixture(scope="module")
def detector() -> SpeechDetector:
    return SpeechDetector()


def cut(pcm: Pcm, detector: Any, feed_samples: int = 32_000) -> list[Window]:
    cutter = WindowCutter(detector)
    windows = []
    for at in range(0, pcm.shape[0], feed_samples):
        windows += [w for w in cutter.feed(pcm[at : at + feed_samples]) if w]
    windows += [w for w in cutter.finish() if w]
    assert cutter.n_samples == pcm.shape[0]
    return windows


def check(windows: list[Window], pcm: Pcm) -> None:
    assert [w.index for w in windows] == list(range(len(windows)))
    for window in windows:
        assert 0 < window.n_samples <= WINDOW_SAMPLES
        true = pcm[window.start_sample : window.start_sample + window.n_samples]
        assert np.array_equal(window.pcm, true), "the offset is not true"
    for left, right in pairwise(windows):
        assert left.start_sample + left.n_samples <= right.start_sample


def covered(windows: list[Window], n_samples: int) -> NDArray[np.bool_]:
    mask = np.zeros(n_samples, np.bool_)
    for window in windows:
        mask[window.start_sample : window.start_sample + window.n_samples] = True
    return mask


# --------------------------------------------------------- properties, with an exact detector

pieces = st.lists(
    st.tuples(st.booleans(), st.integers(2, 300)), min_size=1, max_size=30
)  # (speech?, frames)


def make_pcm(script: list[tuple[bool, int]], extra_samples: int = 0) -> Pcm:
    rng = np.random.default_rng(0)
    parts = []
    for speech, frames in script:
        length = frames * FRAME_SAMPLES
        loud = rng.integers(200, 20_000, length).astype(np.int16)
        parts.append(loud if speech else np.zeros(length, np.int16))
    return np.concatenate((*parts, np.zeros(extra_samples, np.int16)))


@settings(max_examples=25, deadline=None)
@given(pieces, st.integers(0, FRAME_SAMPLES - 1))
def test_windows_cover_all_speech(script: list[tuple[bool, int]], extra_samples: int) -> None:
    pcm = make_pcm(script, extra_samples)
    windows = cut(pcm, LoudnessDetector())
    check(windows, pcm)
    lost = (np.abs(pcm.astype(np.int32)) > 100) & ~covered(windows, pcm.shape[0])
    assert not lost.any(), f"speech at {np.flatnonzero(lost)[0] / SAMPLE_RATE:.2f} s is lost"
    for window in windows:
        assert np.abs(window.pcm.astype(np.int32)).max() > 100, "a window without speech"


@settings(max_examples=15, deadline=None)
@given(pieces, st.integers(1_000, 100_000))
def test_windows_do_not_depend_on_how_the_audio_arrives(
    script: list[tuple[bool, int]], feed_samples: int
) -> None:
    pcm = make_pcm(script)
    once = cut(pcm, LoudnessDetector(), pcm.shape[0])
    pieced = cut(pcm, LoudnessDetector(), feed_samples)
    assert [(w.start_sample, w.n_samples) for w in once] == [
        (w.start_sample, w.n_samples) for w in pieced
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(3, 300), st.integers(1, 90)), min_size=8, max_size=20))
def test_a_cut_is_in_a_pause_where_the_last_ten_seconds_have_one(
    script: list[tuple[int, int]],
) -> None:
    pcm = make_pcm([piece for s, p in script for piece in ((True, s), (False, p))])
    quiet = np.abs(pcm.astype(np.int32)) <= 100
    pauses = [(a, b) for a, b in runs(quiet) if b - a >= 0.2 * SAMPLE_RATE]
    for window in cut(pcm, LoudnessDetector()):
        end = window.start_sample + window.n_samples
        limit = window.start_sample + WINDOW_SAMPLES
        earliest = limit - 10 * SAMPLE_RATE
        if end < pcm.shape[0] and any(a >= earliest and b <= limit for a, b in pauses):
            assert any(a <= end <= b for a, b in pauses), f"cut at {end / SAMPLE_RATE:.2f} s"


def test_without_a_pause_the_quietest_moment_is_taken() -> None:
    pcm = make_pcm([(True, round(40 / FRAME_S))])
    soft = slice(round(25.0 * SAMPLE_RATE), round(25.2 * SAMPLE_RATE))
    pcm[soft] //= 50
    first, second = cut(pcm, LoudnessDetector())
    assert first.end_s == second.start_s == pytest.approx(25.1, abs=0.02)


def test_the_longest_pause_wins_and_then_the_latest() -> None:
    script = [(True, 700), (False, 10), (True, 50), (False, 20), (True, 50), (False, 10)]
    windows = cut(make_pcm([*script, (True, 400)]), LoudnessDetector())
    assert windows[0].end_s == pytest.approx((760 + 10) * FRAME_S)
    script = [(True, 700), (False, 20), (True, 50), (False, 20), (True, 50)]
    windows = cut(make_pcm([*script, (True, 400)]), LoudnessDetector())
    assert windows[0].end_s == pytest.approx((770 + 10) * FRAME_S)


def test_long_silence_ends_a_half_full_window_and_very_long_silence_any() -> None:
    second = round(1 / FRAME_S)
    speech, pause, wait = (True, 5 * second), (False, 4 * second), (False, 10 * second)
    few = cut(make_pcm([speech, pause, speech, pause, speech, pause, speech]), LoudnessDetector())
    assert [round(w.start_s) for w in few] == [0, 26], "5 s speech, 4 s silence: joined"
    apart = cut(make_pcm([speech, wait, speech, wait, speech]), LoudnessDetector())
    assert [round(w.start_s) for w in apart] == [0, 14, 29]
    assert all(w.n_samples < 7 * SAMPLE_RATE for w in apart), "silence is left out"


def test_the_first_window_leaves_before_the_rest_is_there() -> None:
    cutter = WindowCutter(LoudnessDetector())  # type: ignore[arg-type]
    pcm = make_pcm([(True, round(120 / FRAME_S))])
    for fed_s in range(2, 120, 2):
        if any(cutter.feed(pcm[(fed_s - 2) * SAMPLE_RATE : fed_s * SAMPLE_RATE])):
            break
    assert fed_s <= 34


# --------------------------------------------------------------------- the real detector


def test_the_detector_streams(detector: SpeechDetector) -> None:
    pcm = joined(silence(0.5), 2 * voice(4.0), silence(1.0))
    pcm += np.random.default_rng(0).integers(-30, 30, pcm.shape[0]).astype(np.int16)
    whole = detector.stream(20_000).feed(pcm)
    stream = detector.stream(20_000)
    pieces = [stream.feed(pcm[at : at + 8 * FRAME_SAMPLES]) for at in range(0, pcm.shape[0], 4096)]
    assert np.abs(np.concatenate(pieces) - whole).max() < 1e-4


def test_a_short_clip_is_one_window_from_its_start(detector: SpeechDetector) -> None:
    pcm = joined(silence(0.4), voice(4.0), silence(0.6))
    (window,) = cut(pcm, detector)
    assert (window.start_sample, window.n_samples) == (0, pcm.shape[0])


def test_long_silence_around_a_short_clip_is_left_out(detector: SpeechDetector) -> None:
    pcm = joined(silence(9.0), voice(3.0), silence(12.0))
    (window,) = cut(pcm, detector)
    assert 8.0 <= window.start_s <= 8.95
    assert 12.0 <= window.end_s <= 14.0


def test_a_window_of_exactly_thirty_seconds_is_not_cut(detector: SpeechDetector) -> None:
    pcm = voice(30.0)
    (window,) = cut(pcm, detector)
    assert window.n_samples == WINDOW_SAMPLES
    assert len(cut(voice(30.1), detector)) == 2


@pytest.mark.parametrize("seconds", [0.1, 3.0, 31.0, 65.0])
def test_audio_without_speech_has_no_window(seconds: float, detector: SpeechDetector) -> None:
    rng = np.random.default_rng(2)
    n_samples = round(seconds * SAMPLE_RATE)
    assert cut(silence(seconds), detector) == []
    assert cut(rng.normal(0, 40, n_samples).astype(np.int16), detector) == []


@pytest.mark.parametrize("gain_db", [0, -20, -30, -40])
def test_quiet_speech_is_kept(gain_db: int, detector: SpeechDetector) -> None:
    pcm = joined(silence(12.0), voice(10.0), silence(12.0), voice(10.0))
    quiet = (pcm * 10 ** (gain_db / 20)).astype(np.int16)
    windows = cut(quiet, detector)
    check(windows, quiet)
    mask = covered(windows, pcm.shape[0])
    assert mask[12 * SAMPLE_RATE : 22 * SAMPLE_RATE].all()
    assert mask[34 * SAMPLE_RATE :].all()


@pytest.mark.parametrize("seconds", [0.3, 10.0, 70.0])
def test_a_window_is_faint_where_the_detector_is_never_sure(seconds: float) -> None:
    pcm = joined(silence(3.0), voice(seconds), silence(3.0))
    assert {w.is_faint for w in cut(pcm, LoudnessDetector(0.4))} == {True}
    assert {w.is_faint for w in cut(pcm, LoudnessDetector(0.9))} == {False}


@pytest.mark.parametrize("gain_db", [0, -40])
@pytest.mark.parametrize("text", ["Yes.", "Stop!", TEXT])
def test_spoken_words_are_not_faint(text: str, gain_db: int, detector: SpeechDetector) -> None:
    spoken = joined(silence(1.0), espeak(text), silence(4.0))
    quiet = (spoken * 10 ** (gain_db / 20)).astype(np.int16)
    assert [w.is_faint for w in cut(quiet, detector)] == [False]


VOICES = ("en-us", "en-us+f3", "en-gb+m7", "de")
IN_SILENCE = [(name, None) for name in (*VOICES, "en-us+whisper")]
IN_NOISE = [(name, -15) for name in VOICES]  # the detector loses whispered words there


@pytest.mark.parametrize(("name", "noise_db"), [*IN_SILENCE, *IN_NOISE])
@pytest.mark.parametrize("gain_db", [0, -30])
def test_spoken_words_at_both_ends_are_kept(
    name: str, gain_db: int, noise_db: int | None, detector: SpeechDetector
) -> None:
    spoken = espeak(TEXT, name)
    loud = np.flatnonzero(np.abs(spoken.astype(np.int32)) > 0.02 * np.abs(spoken).max())
    spoken = spoken[loud[0] : loud[-1] + 1]
    pcm = joined(spoken, silence(10.0), spoken, silence(0.5), spoken, spoken, spoken, spoken)
    signal = pcm * 0.7
    if noise_db is not None:
        level = np.sqrt(np.mean(np.square(spoken * 0.7))) * 10 ** (noise_db / 20)
        signal = signal + np.random.default_rng(0).normal(0, level, pcm.shape[0])
    heard = np.clip(signal * 10 ** (gain_db / 20), -32768, 32767).astype(np.int16)
    windows = cut(heard, detector)
    check(windows, heard)
    mask = covered(windows, pcm.shape[0])
    second = spoken.shape[0] + 10 * SAMPLE_RATE
    for start in (0, second):
        missing = ~mask[start : start + spoken.shape[0]]
        assert missing.sum() == 0, f"{missing.sum() / SAMPLE_RATE:.2f} s of speech lost"
    assert mask[second + spoken.shape[0] + SAMPLE_RATE :].all()


def test_the_pauses_of_real_sentences_are_where_it_cuts(detector: SpeechDetector) -> None:
    """Sentences without any silence around them, 0.25 s apart."""
    texts = (
        "The quick brown fox jumps over the lazy dog and runs along the river to the sea",
        "Tomorrow morning we will travel by train to visit my mother in the mountains",
        "Seven green birds are singing loudly in the garden behind our little house",
    )
    parts, pauses, at = [], [], 0
    for index in range(30):
        spoken = espeak(texts[index % 3])
        loud = np.flatnonzero(np.abs(spoken.astype(np.int32)) > 300)
        spoken = spoken[loud[0] : loud[-1] + 1]
        parts += [spoken, silence(0.25)]
        at += spoken.shape[0]
        pauses.append((at, at + SAMPLE_RATE // 4))
        at += SAMPLE_RATE // 4
    pcm = joined(*parts)
    windows = cut(pcm, detector)
    check(windows, pcm)
    assert len(windows) >= 4
    for window in windows[:-1]:
        end = window.start_sample + window.n_samples
        assert any(a <= end <= b for a, b in pauses), f"cut at {window.end_s:.2f} s"


# ----------------------------------------------------------------------------- the mask


def test_a_run_is_speech_when_it_reaches_the_threshold() -> None:
    options = VadOptions(threshold=0.3, release=0.1, min_speech_frames=2)
    probabilities = np.array([0.0, 0.15, 0.5, 0.2, 0.0, 0.2, 0.2, 0.0, 0.9, 0.0], np.float32)
    assert runs(speech_mask(probabilities, options)) == [(1, 4)]
