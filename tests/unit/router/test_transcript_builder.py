"""Tokens to segments by openai/whisper's rule, segments to one transcript."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.common.messages import DecodeResult, DecodeTimings, QualityGates, TokenAlignment
from router.transcript import Transcript, WindowTranscript
from router.transcript_builder import TranscriptBuilder, gather_window, token_logprobs

GATES = QualityGates()

T0 = 1000  # the id of <|0.00|> here
WORDS = {1: " one", 2: " two", 3: " three", 4: " "}


class Words:
    special = SimpleNamespace(timestamp_begin=T0, eot=T0 - 1)
    timestamp_step_s = 0.02

    def is_timestamp(self, token: int) -> bool:
        return token >= T0

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(WORDS.get(token, "") for token in tokens)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return self.decode(tokens).encode()


TOKENIZER: Any = Words()


def t(seconds: float) -> int:
    return T0 + round(seconds / 0.02)


def make_result(*tokens: int, **changes: object) -> DecodeResult:
    timings = DecodeTimings(0.0, 0.0, 0, "memory", 0.0, 0.0, 0)
    fields: dict[str, object] = {
        "request_id": "r",
        "window": 0,
        "tokens": tokens,
        "token_logprobs": (-0.1,) * len(tokens),
        "avg_logprob": -0.1,
        "no_speech_prob": 0.01,
        "language": "en",
        "temperature": 0.0,
        "finish_reason": "stop",
        "timings": timings,
    }
    return DecodeResult(**{**fields, **changes})  # type: ignore[arg-type]


def gather(
    *tokens: int, offset_s: float = 0.0, duration_s: float = 10.0, **changes: object
) -> WindowTranscript:
    result = make_result(*tokens, **changes)
    return gather_window(
        result, GATES, offset_s=offset_s, duration_s=duration_s, tokenizer=TOKENIZER
    )


def whole(*windows: WindowTranscript, language: str | None = None) -> Transcript:
    builder = TranscriptBuilder(TOKENIZER)
    for index, window in enumerate(windows):
        builder.add(index, [window])
    return builder.finish(duration_s=30.0, language=language)


def spans(*windows: WindowTranscript) -> list[tuple[float, float, str]]:
    return [(s.start, s.end, s.text) for s in whole(*windows).segments]


def test_pairs_of_timestamps_cut_and_a_single_one_closes_the_last_segment() -> None:
    window = gather(t(0.0), 1, t(1.2), t(1.4), 2, 3, t(2.0))
    assert spans(window) == [(0.0, 1.2, " one"), (1.4, 2.0, " two three")]
    assert window.segments[1].tokens == (t(1.4), 2, 3, t(2.0))
    assert window.undecoded_s is None


@pytest.mark.parametrize(
    ("rest", "has_tail"), [((t(1.4), 2), True), ((t(1.4), 2, 3), True), ((t(1.4),), False)]
)
def test_a_rest_without_closing_timestamp_is_left_to_be_decoded_again(
    rest: tuple[int, ...], has_tail: bool
) -> None:
    window = gather(t(0.0), 1, t(1.2), *rest, offset_s=60.0)
    assert spans(window) == [(60.0, 61.2, " one")]
    assert window.undecoded_s == pytest.approx(61.2)
    assert window.has_tail is has_tail


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((t(0.4), 1, 2, t(3.0)), [(0.0, 3.0, " one two")]),  # one segment without pairs
        ((t(0.0), 1), [(0.0, 10.0, " one")]),
        ((1, 2), [(0.0, 10.0, " one two")]),
        ((1, t(0.0)), [(0.0, 10.0, " one")]),
        ((t(0.0), 1, t(2.0), t(11.0), 2, t(12.0)), [(0.0, 2.0, " one")]),  # behind the audio
        (
            (t(0.0), 1, t(1.0), t(1.0), 4, t(2.0), t(2.0), 2, t(2.0), t(3.0), 3, t(4.0)),
            [(0.0, 1.0, " one"), (3.0, 4.0, " three")],  # neither empty nor without a length
        ),
    ],
)
def test_tokens_become_segments_inside_the_audio(
    tokens: tuple[int, ...], expected: list[tuple[float, float, str]]
) -> None:
    assert spans(gather(*tokens)) == expected


def test_such_a_window_begins_with_its_first_timestamp_where_that_is_trusted() -> None:
    cases = (((t(0.4), 1, 2, t(3.0)), 0.4, 3.0), ((t(0.4), 1), 0.4, 10.0), ((1, t(3.0)), 0.0, 3.0))
    for tokens, start, end in cases:
        result = make_result(*tokens)
        window = gather_window(
            result, GATES, offset_s=60.0, duration_s=10.0, tokenizer=TOKENIZER, trust_start=True
        )
        assert [(s.start, s.end) for s in whole(window).segments] == [(60.0 + start, 60.0 + end)]


def test_times_are_offsets_in_the_upload_and_stay_inside_the_window() -> None:
    window = gather(t(0.0), 1, t(2.0), t(2.0), 2, t(29.0), offset_s=60.12, duration_s=4.5)
    assert spans(window) == [(60.12, 62.12, " one"), (62.12, 64.62, " two")]
    assert {s.seek for s in window.segments} == {6012}


@pytest.mark.parametrize(
    ("no_speech_prob", "avg_logprob", "kept"),
    [(0.7, -1.5, False), (0.7, -1.0, False), (0.7, -0.9, True), (0.6, -1.5, True)],
)
def test_silence_is_dropped_unless_the_text_is_sure(
    no_speech_prob: float, avg_logprob: float, kept: bool
) -> None:
    window = gather(t(0.0), 1, t(1.0), no_speech_prob=no_speech_prob, avg_logprob=avg_logprob)
    assert bool(window.segments) is kept


def test_scores_belong_to_the_window_and_logprobs_to_the_tokens() -> None:
    window = gather(
        *(t(0.0), 1, t(1.0), t(1.0), 2, t(2.0)),
        temperature=0.4,
        compression_ratio=0.7,
        token_logprobs=(-0.1, -0.2, -0.3, -0.4, -0.5, -0.6),
    )
    first, second = window.segments
    assert first.compression_ratio == second.compression_ratio == 0.7
    assert (first.temperature, first.avg_logprob, first.no_speech_prob) == (0.4, -0.1, 0.01)
    assert (first.logprobs, second.logprobs) == ((-0.1, -0.2, -0.3), (-0.4, -0.5, -0.6))
    found = token_logprobs(window.segments, TOKENIZER)
    assert [(f.token, f.logprob, bytes(f.bytes)) for f in found] == [
        (" one", -0.2, b" one"),
        (" two", -0.5, b" two"),
    ]


def test_what_is_told_in_any_order_of_arrival_is_the_transcript_piece_by_piece() -> None:
    rng = random.Random(0)
    for _ in range(50):
        windows = [
            [gather(*((t(0.0), rng.randint(1, 4), t(1.0)) * rng.randint(0, 2)), offset_s=10.0 * n)]
            for n in range(6)
        ]
        builder = TranscriptBuilder(TOKENIZER)
        texts, segments = [], []
        arrived: set[int] = set()
        for index in rng.sample(range(6), 6):
            text, closed = builder.add(index, windows[index])
            arrived.add(index)
            texts.append(text)
            segments += closed
            assert not (text and 0 not in arrived)
        transcript = builder.finish(duration_s=60.0)
        assert "".join(texts) == transcript.text
        assert tuple(segments) == transcript.segments
        assert [segment.id for segment in segments] == list(range(len(segments)))
        starts_s = [segment.start for segment in segments]
        assert starts_s == sorted(starts_s)
        assert (transcript.duration_s, transcript.task) == (60.0, "transcribe")


@pytest.mark.parametrize("times_s", [(0.0, 1.9, 4.3), (0.0, 4.1, 4.9)], ids=["half", "all"])
def test_no_word_of_a_part_is_said_behind_the_first_of_the_next_part(
    times_s: tuple[float, ...],
) -> None:
    """Alignment spreads a part's text over all of its audio, that of the next part included."""
    spread = TokenAlignment((1, 2), times_s, (0.9, 0.9))
    rest = TokenAlignment((3,), (0.05, 0.6), (0.9,))
    builder = TranscriptBuilder(TOKENIZER)
    closed = t(0.0), 1, t(2.0), t(2.0), 2, t(4.0)
    first = gather(*closed, t(4.0), 3, alignment=spread)
    builder.add(0, [first, gather(t(0.0), 3, t(1.0), offset_s=4.0, alignment=rest)])
    transcript = builder.finish(duration_s=30.0)
    assert transcript.text == "one two three"
    for spans in (transcript.words, transcript.segments):
        assert all(before.end <= span.start for before, span in pairwise(spans)), spans


def test_the_language_is_the_one_with_most_speech() -> None:
    windows = [gather(t(0.0), 1, t(n), language=code) for code, n in (("de", 2.0), ("en", 5.0))]
    windows.append(gather(language="ja"))
    assert whole(*windows).language == "en"
    assert whole(*windows, language="ja").language == "ja"
    assert whole(*windows[2:]).language == "ja", "none spoken: the first"
    assert whole().language == "en"
