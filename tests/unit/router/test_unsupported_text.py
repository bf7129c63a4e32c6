"""Text that the decoder doubts needs the detector's support; unheard speech is heard again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE, QualityGates
from router.audio.windows import Window
from router.parallel import gates_for, unheard_from, without_hallucinations
from router.transcript import Segment, WindowTranscript

GATES = QualityGates()
OFF = QualityGates(None, None, None)
START_S, LENGTH_S = 100.0, 20.0


def make_window(*speech_s: tuple[float, float], is_faint: bool = False) -> Window:
    """From 100 s to 120 s, with speech at the given times of the upload."""
    speech = tuple((int(a * SAMPLE_RATE), int(b * SAMPLE_RATE)) for a, b in speech_s)
    pcm = np.zeros(int(LENGTH_S * SAMPLE_RATE), np.int16)
    return Window(0, int(START_S * SAMPLE_RATE), pcm, is_faint, speech)


def make_part(*segments: tuple[float, float, float]) -> WindowTranscript:
    """Segments of three tokens: start, end, and the log probability of each of them."""
    made = tuple(
        Segment(i, 0, start, end, " text", (1, 2, 3), 0.0, -0.4, 1.0, 0.0, (logprob,) * 3)
        for i, (start, end, logprob) in enumerate(segments)
    )
    return WindowTranscript(START_S, LENGTH_S, "en", made)


def kept(part: WindowTranscript) -> list[bool]:
    return [bool(segment.text) for segment in part.segments]


def test_in_a_faint_window_doubt_is_enough_for_silence() -> None:
    clear = make_window((101, 103))
    faint = replace(clear, is_faint=True)
    assert gates_for(clear, GATES) is GATES
    assert gates_for(faint, OFF) is OFF
    strict = gates_for(faint, GATES)
    assert (strict.no_speech_prob, strict.avg_logprob) == (0.0, -0.5)
    assert strict.compression_ratio == GATES.compression_ratio


def test_doubted_text_where_nobody_speaks_is_left_out() -> None:
    part = make_part((101, 103, -0.3), (104, 110, -1.4), (111, 113, -1.4), (114, 116, -0.9))
    found = without_hallucinations(part, make_window((101, 103), (111, 113)), GATES)
    assert kept(found) == [True, False, True, True]
    assert [s.tokens for s in found.segments] == [s.tokens for s in part.segments]


def test_half_of_a_segment_must_be_speech_where_it_is_doubted() -> None:
    part = make_part((104, 108, -1.4))
    assert kept(without_hallucinations(part, make_window((103, 105.9)), GATES)) == [False]
    assert kept(without_hallucinations(part, make_window((103, 105), (107, 109)), GATES)) == [True]


def test_nothing_is_left_out_where_that_cannot_be_told() -> None:
    part, window = make_part((104, 110, -1.4)), make_window((101, 103))
    assert without_hallucinations(part, replace(window, speech=None), GATES) is part
    assert without_hallucinations(part, window, OFF) is part


@pytest.mark.parametrize(
    ("segments", "speech", "start_s"),
    [
        ([(101, 103)], [(101, 103), (110, 112)], 109.7),
        ([(101, 103)], [(101, 105)], 103.0),
        ([(101, 103)], [(103.1, 103.7), (110, 110.5)], 103.0),
        ([(101, 103)], [(101, 103.1), (110, 112)], 109.7),  # the text's own end, and a pause
        ([(101, 103)], [(101, 103.9)], None),  # too short
        ([(101, 103)], [(101, 103)], None),
        ([(101, 103), (104, 129)], [(101, 103), (110, 112)], None),
        ([], [(101, 103), (110, 112)], None),
        ([(100, 100)], [(100, 110)], None),  # it would be the whole part again
    ],
)
def test_the_rest_begins_shortly_before_the_speech_that_was_not_heard(
    segments: list[tuple[float, float]], speech: list[tuple[float, float]], start_s: float | None
) -> None:
    part = make_part(*((start, end, -0.3) for start, end in segments))
    found = unheard_from(part, make_window(*speech))
    assert found == (None if start_s is None else pytest.approx(start_s))


def test_without_known_speech_in_the_part_there_is_no_rest() -> None:
    part, window = make_part((101, 103, -0.3)), make_window((101, 103), (106, 112))
    assert unheard_from(part, replace(window, speech=None)) is None
    assert unheard_from(replace(part, duration_s=4.0), window) is None


def test_speech_whose_text_was_left_out_is_heard_again() -> None:
    window = make_window((101, 103), (110, 112))
    part = without_hallucinations(make_part((101, 103, -0.3), (103, 116, -1.4)), window, GATES)
    assert kept(part) == [True, False]
    assert unheard_from(part, window) == pytest.approx(109.7)
    nothing = without_hallucinations(make_part((103, 116, -1.4)), window, GATES)
    again = replace(nothing, offset_s=109.7)
    assert unheard_from(again, window) is None, "that was decoded from its beginning"
