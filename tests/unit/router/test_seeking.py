"""Where windows begin, what they see of the text, and that a file always comes to its end.

That the rules are openai-whisper's is compared in `tests/parity/test_sequential.py`; here are the
cases that no model can be made to give on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.common.messages import DecodeResult, DecodeTimings, QualityGates, TokenAlignment
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.api.params import SequentialOptions
from router.seeking import (
    PlannedWindow,
    Seeker,
    Surroundings,
    TextContext,
    clips_of,
    first_hallucination,
    is_anomalous,
)
from router.transcript import Segment, Word
from tests.support.checkpoints import cached_checkpoint

TOKENIZER = WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))
BEGIN = TOKENIZER.special.timestamp_begin
TIMINGS = DecodeTimings(0.0, 0.0, 0, "memory", 0.0, 0.0, 1)


def stamp(seconds: float) -> int:
    return BEGIN + round(seconds / 0.02)


def tokens_of(*parts: float | str) -> tuple[int, ...]:
    """Timestamps and texts: `tokens_of(0.0, " hi", 1.5)`."""
    tokens: list[int] = []
    for part in parts:
        tokens += TOKENIZER.encode(part) if isinstance(part, str) else [stamp(part)]
    return tuple(tokens)


def result_of(*parts: float | str, **changes: object) -> DecodeResult:
    tokens = tokens_of(*parts)
    result = DecodeResult(
        "r", 0, tokens, (-0.1,) * len(tokens), -0.1, 0.0, "en", 0.0, "stop", TIMINGS
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def aligned(
    result: DecodeResult, times_s: Sequence[float], probs: Sequence[float] = (0.9,)
) -> DecodeResult:
    """With its words' times; words without a space in them are a token each."""
    text = tuple(token for token in result.tokens if token < TOKENIZER.special.eot)
    assert len(times_s) == len(text) + 1
    spread = tuple(probs) if len(probs) > 1 else tuple(probs) * len(text)
    return replace(result, alignment=TokenAlignment(text, tuple(times_s), spread))


def seeker_of(
    content_frames: int,
    prompt: str | None = None,
    hotwords: str | None = None,
    aligned: bool = False,
    **options: object,
) -> Seeker:
    chosen = SequentialOptions(**options)  # type: ignore[arg-type]
    context = TextContext(
        TOKENIZER, 448, prompt=prompt, hotwords=hotwords, carried=chosen.carry_initial_prompt
    )
    return Seeker(content_frames, context, TOKENIZER, chosen, QualityGates(), aligned=aligned)


def planned(seeker: Seeker) -> PlannedWindow:
    window = seeker.next_window()
    assert window is not None
    return window


def run(seeker: Seeker, results: Iterable[DecodeResult]) -> list[tuple[int, int]]:
    """Seek and frames of each window until all is done."""
    windows = []
    for result in results:
        window = seeker.next_window()
        if window is None:
            return windows
        windows.append((window.seek, window.n_frames))
        seeker.take(result)
    raise AssertionError(f"no end after {windows[-3:]}")


# -------------------------------------------------------------------------------- seeking


def test_the_next_window_begins_at_the_last_closed_timestamp() -> None:
    seeker = seeker_of(5_000)
    planned(seeker)
    segments = seeker.take(result_of(0.0, " a", 4.0, 5.0, " b", 9.0, 9.5, " c"))
    assert [(s.start, s.end, s.text) for s in segments] == [(0.0, 4.0, " a"), (5.0, 9.0, " b")]
    assert planned(seeker).seek == 900


def test_a_single_timestamp_at_the_end_means_that_nothing_follows() -> None:
    seeker = seeker_of(5_000)
    planned(seeker)
    seeker.take(result_of(0.0, " a", 4.0, 5.0, " b", 9.0))
    assert planned(seeker).seek == 3_000


def test_windows_are_as_long_as_what_is_left() -> None:
    assert run(seeker_of(6_123), [result_of(0.0, " a")] * 9) == [
        (0, 3_000),
        (3_000, 3_000),
        (6_000, 123),
    ]


def test_segments_are_numbered_over_windows_and_times_not_clipped() -> None:
    seeker = seeker_of(3_100)
    planned(seeker)
    first = seeker.take(result_of(0.0, " a", 2.0, 2.0, " ", 3.0, 3.0, " b", 4.0))
    planned(seeker)
    second = seeker.take(result_of(0.0, " c", 29.98))
    assert [(s.id, s.text) for s in (*first, *second)] == [(0, " a"), (1, " b"), (2, " c")]
    assert (second[0].start, second[0].end) == (30.0, 59.98)


@pytest.mark.parametrize(
    ("timestamps", "expected"),
    [
        ((), [(0, 1_000)]),
        ((2.0,), [(200, 1_000)]),
        ((2.0, 3.005), [(200, 300)]),
        ((2.0, 99.0), [(200, 1_000)]),
        ((5.0, 6.0, 1.0), [(500, 600), (100, 1_000)]),
    ],
)
def test_clips_in_frames(timestamps: tuple[float, ...], expected: list[tuple[int, int]]) -> None:
    assert clips_of(timestamps, 1_000) == expected


@given(
    data=st.data(),
    content_frames=st.integers(0, 20_000),
    clips=st.lists(st.floats(0, 300, allow_nan=False), max_size=5),
    silence_s=st.sampled_from([None, 0.0, 0.5, 3.0]),
)
@settings(max_examples=100, deadline=None)
def test_each_window_is_in_a_clip_and_begins_behind_the_one_before(
    data: st.DataObject, content_frames: int, clips: list[float], silence_s: float | None
) -> None:
    """Whatever is decoded; so every file comes to its end."""
    seeker = seeker_of(
        content_frames,
        aligned=True,
        clip_timestamps=tuple(clips),
        hallucination_silence_threshold=silence_s,
    )
    bounds = clips_of(clips, content_frames)
    before = (len(bounds) + 1, 0)  # clips that are left, and where the window began
    for _ in range(20):
        window = seeker.next_window()
        if window is None:
            return
        start, end = bounds[-len(seeker._clips)]
        assert start <= window.seek < window.seek + window.n_frames <= end
        assert window.n_frames <= 3_000
        place = (len(seeker._clips), window.seek)
        assert place[0] < before[0] or place[1] > before[1]
        before = place
        stamps = sorted(data.draw(st.lists(st.floats(0, 30), min_size=3, max_size=4)))
        said = result_of(stamps[0], " a", *stamps[1:-1], "b", stamps[-1])
        times = st.lists(st.floats(-1.0, 31.0, allow_nan=False), min_size=3, max_size=3)
        probs = data.draw(st.sampled_from([(0.01,), (0.9,), (0.9, 0.01)]))
        seeker.take(aligned(said, sorted(data.draw(times)), probs))


def test_a_pause_below_a_frame_does_not_hold_its_window() -> None:
    """openai-whisper would decode the same window for ever."""
    seeker = seeker_of(9_000, aligned=True, hallucination_silence_threshold=0.0)
    planned(seeker)
    seeker.take(result_of(0.0, " a", 1.0, avg_logprob=-2.0, no_speech_prob=0.9))
    assert planned(seeker).seek == 3_000
    times_s = (0.0, 1.0, 1.4985, 1.997)  # the first word is shortened to 0.003 s .. 1.0 s
    assert seeker.take(aligned(result_of(0.0, " a a a", 2.0), times_s, (0.01,))) == ()
    assert planned(seeker).seek == 6_000


# -------------------------------------------------------------------------------- context


def test_a_window_sees_what_was_said_timestamps_included() -> None:
    seeker = seeker_of(9_000, prompt=" hi \n")
    assert planned(seeker).prompt_tokens == tokens_of(" hi")
    seeker.take(result_of(0.0, " a", 4.0, 4.0, " ", 5.0, 5.0, " b"))
    assert planned(seeker).prompt_tokens == tokens_of(" hi", 0.0, " a", 4.0)


def test_text_is_forgotten_after_a_high_temperature() -> None:
    seeker = seeker_of(9_000, prompt="hi")
    for temperature, seen in ((0.4, tokens_of(" hi", 0.0, " a", 1.0)), (0.6, ())):
        planned(seeker)
        seeker.take(result_of(0.0, " a", 1.0, temperature=temperature))
        assert planned(seeker).prompt_tokens == seen


def test_without_conditioning_only_the_first_window_sees_the_prompt() -> None:
    seeker = seeker_of(9_000, prompt="hi", condition_on_previous_text=False)
    assert planned(seeker).prompt_tokens == tokens_of(" hi")
    seeker.take(result_of(0.0, " a", 1.0))
    assert planned(seeker).prompt_tokens == ()


def test_silence_neither_adds_to_the_context_nor_clears_it() -> None:
    seeker = seeker_of(9_000, prompt="hi")
    planned(seeker)
    silence = result_of(0.0, " a", 1.0, avg_logprob=-2.0, no_speech_prob=0.9, temperature=1.0)
    assert seeker.take(silence) == ()
    window = planned(seeker)
    assert (window.seek, window.prompt_tokens) == (3_000, tokens_of(" hi"))


def test_hotwords_keep_their_place_and_earlier_text_gives_way() -> None:
    seeker = seeker_of(90_000, hotwords="boat", carry_initial_prompt=True, prompt="hi")
    for _ in range(20):
        planned(seeker)
        seeker.take(result_of(0.0, " wqwqwqwqwqwqwqwq", 1.0))
    tokens = planned(seeker).prompt_tokens
    assert len(tokens) == 223
    head = tokens_of(" boat", " hi")
    assert tokens[: len(head)] == head
    assert tokens[-2:] == tokens_of("q", 1.0)


def test_hotwords_that_take_all_the_room_leave_none() -> None:
    seeker = seeker_of(9_000, hotwords="wq" * 200, prompt="hi")
    tokens = planned(seeker).prompt_tokens
    assert tokens == tokens_of(" " + "wq" * 200)[:223]


# ---------------------------------------------------------------------------- hallucination


def segment(start: float, end: float, probability: float = 0.9, n_words: int = 3) -> Segment:
    step = (end - start) / n_words
    words = tuple(
        Word(start + n * step, start + (n + 1) * step, " w", probability) for n in range(n_words)
    )
    return Segment(0, 0, start, end, " w" * n_words, (), 0.0, 0.0, 1.0, 0.0, (), words)


AROUND = Surroundings(start_s=100.0, end_s=130.0, limit_s=130.0, last_speech_s=99.0, silence_s=2.0)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (segment(0.0, 1.5), False),
        (segment(0.0, 1.5, probability=0.1), True),  # 1 for each of three words
        (segment(0.0, 0.1), True),  # 33 ms each
        (segment(0.0, 15.0), True),  # 5 s each
        (segment(0.0, 4.0, probability=0.1, n_words=2), True),  # fewer than three, but all
        (replace(segment(0.0, 1.5), words=()), False),
        (replace(segment(0.0, 1.5), words=(Word(0.0, 1.0, ".", 0.0),)), True),
    ],
)
def test_words_that_nobody_speaks(case: Segment, expected: bool) -> None:
    """Where only marks are left, nothing is below nothing: so has it openai-whisper."""
    assert is_anomalous(case) is expected


def test_an_anomaly_between_speech_is_no_hallucination() -> None:
    doubtful = segment(106.0, 107.5, probability=0.1)
    beside_speech = [segment(101.0, 105.0), doubtful, segment(108.0, 112.0)]
    assert first_hallucination(beside_speech, AROUND) is None
    amid_silence = [segment(101.0, 103.0), doubtful, segment(111.0, 114.0)]
    assert first_hallucination(amid_silence, AROUND) == 1


def test_what_seems_made_up_is_left_out_and_the_silence_before_it_skipped() -> None:
    seeker = seeker_of(9_000, aligned=True, hallucination_silence_threshold=2.0)
    planned(seeker)
    said = result_of(0.0, " a", 2.0, 8.0, " a", 12.0)
    segments = seeker.take(aligned(said, (0.0, 0.5, 10.1), (0.9, 0.01)))
    assert [(s.text, s.start, s.end) for s in segments] == [(" a", 0.0, 0.5)]
    window = planned(seeker)
    assert window.seek == 870  # the word ends at 10.1 s and is taken to last 1.4 s
    assert window.prompt_tokens == tokens_of(0.0, " a", 2.0)
