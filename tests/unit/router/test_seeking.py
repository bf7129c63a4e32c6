"""Where windows begin, what they see of the text, and that a file always comes to its end.

That the rules are openai-whisper's is compared in `tests/parity/test_sequential.py`; here are the
cases that no model can be made to give on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.common.messages import DecodeResult, DecodeTimings, QualityGates, TokenAlignment
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.api.params import SequentialOptions
from router.seeking import PlannedWindow, Seeker, TextContext, clips_of
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


# -------------------------------------------------------------------------------- seeking


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
