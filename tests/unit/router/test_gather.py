"""Tokens to segments by openai/whisper's rule, segments to one transcript."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from cluster.messages import DecodeResult, DecodeTimings
from router.gather import WindowTranscript, compression_ratio, gather_window, merge_windows

T0 = 1000  # the id of <|0.00|> here
WORDS = {1: " one", 2: " two", 3: " three", 4: " "}


class Words:
    """A tokenizer of three words."""

    def is_timestamp(self, token: int) -> bool:
        return token >= T0

    def timestamp_s(self, token: int) -> float:
        return (token - T0) * 0.02

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(WORDS.get(token, "") for token in tokens)


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


def gather(*tokens: int, offset_s: float = 0.0, duration_s: float = 10.0) -> WindowTranscript:
    result = make_result(*tokens)
    return gather_window(result, offset_s=offset_s, duration_s=duration_s, tokenizer=Words())


def spans(window: WindowTranscript) -> list[tuple[float, float, str]]:
    return [(s.start, s.end, s.text) for s in window.segments]


def test_pairs_of_timestamps_cut_and_a_single_one_closes_the_last_segment() -> None:
    window = gather(t(0.0), 1, t(1.2), t(1.4), 2, 3, t(2.0))
    assert spans(window) == [(0.0, 1.2, " one"), (1.4, 2.0, " two three")]
    assert window.segments[1].tokens == (t(1.4), 2, 3, t(2.0))


def test_a_closing_pair_leaves_no_empty_segment() -> None:
    assert spans(gather(t(0.0), 1, t(1.2), t(1.2), 2, t(2.0), t(2.0))) == [
        (0.0, 1.2, " one"),
        (1.2, 2.0, " two"),
    ]


def test_a_tail_without_closing_timestamp_lasts_until_the_windows_end() -> None:
    assert spans(gather(t(0.0), 1, t(1.2), t(1.4), 2)) == [(0.0, 1.2, " one"), (1.4, 10.0, " two")]


def test_without_pairs_the_window_is_one_segment_until_its_last_timestamp() -> None:
    assert spans(gather(t(0.4), 1, 2, t(3.0))) == [(0.0, 3.0, " one two")]


@pytest.mark.parametrize("tokens", [(t(0.0), 1), (1, 2), (1, t(0.0))])
def test_without_a_nonzero_timestamp_it_lasts_until_the_windows_end(tokens: list[int]) -> None:
    assert [(s.start, s.end) for s in gather(*tokens).segments] == [(0.0, 10.0)]


def test_times_are_offsets_in_the_upload_and_stay_inside_the_window() -> None:
    window = gather(t(0.0), 1, t(2.0), t(2.0), 2, t(29.0), offset_s=60.12, duration_s=4.5)
    assert spans(window) == [(60.12, 62.12, " one"), (62.12, 64.62, " two")]
    assert {s.seek for s in window.segments} == {6012}


def test_what_begins_behind_the_audio_is_dropped() -> None:
    assert spans(gather(t(0.0), 1, t(2.0), t(6.0), 2, t(7.0), duration_s=5.0)) == [
        (0.0, 2.0, " one")
    ]


def test_empty_and_zero_length_segments_are_dropped() -> None:
    window = gather(t(0.0), 1, t(1.0), t(1.0), 4, t(2.0), t(2.0), 2, t(2.0), t(3.0), 3, t(4.0))
    assert spans(window) == [(0.0, 1.0, " one"), (3.0, 4.0, " three")]


def test_no_tokens_no_segments() -> None:
    assert gather().segments == ()


@pytest.mark.parametrize(
    ("no_speech_prob", "avg_logprob", "kept"),
    [(0.7, -1.5, False), (0.7, -1.0, False), (0.7, -0.9, True), (0.6, -1.5, True)],
)
def test_silence_is_dropped_unless_the_text_is_sure(
    no_speech_prob: float, avg_logprob: float, kept: bool
) -> None:
    result = make_result(t(0.0), 1, t(1.0), no_speech_prob=no_speech_prob, avg_logprob=avg_logprob)
    window = gather_window(result, offset_s=0.0, duration_s=5.0, tokenizer=Words())
    assert bool(window.segments) is kept


def test_scores_belong_to_the_window() -> None:
    result = make_result(t(0.0), 1, t(1.0), t(1.0), 2, t(2.0), temperature=0.4)
    first, second = gather_window(result, offset_s=0.0, duration_s=5.0, tokenizer=Words()).segments
    expected = len(b"one two") / len(zlib.compress(b"one two"))
    assert first.compression_ratio == second.compression_ratio == expected
    assert (first.temperature, first.avg_logprob, first.no_speech_prob) == (0.4, -0.1, 0.01)


def test_repetition_raises_the_compression_ratio() -> None:
    assert compression_ratio("round and round " * 30) > 2.4 > compression_ratio("once said")
    assert compression_ratio("") == 0.0


def test_windows_in_any_order_become_one_transcript() -> None:
    first = gather(t(0.0), 1, t(1.0), t(1.0), 2, t(2.0))
    second = gather(t(0.0), 3, t(1.0), offset_s=10.0)
    whole = merge_windows([second, first], duration_s=20.0)
    assert whole.text == "one two three"
    assert [(s.id, s.start) for s in whole.segments] == [(0, 0.0), (1, 1.0), (2, 10.0)]
    assert (whole.duration_s, whole.task) == (20.0, "transcribe")


def make_window(language: str, spoken_s: float, offset_s: float) -> WindowTranscript:
    tokens = (t(0.0), 1, t(spoken_s)) if spoken_s else ()
    result = make_result(*tokens, language=language)
    return gather_window(result, offset_s=offset_s, duration_s=10.0, tokenizer=Words())


def test_the_language_is_the_one_with_most_speech() -> None:
    windows = [
        make_window("de", 2.0, 0.0),
        make_window("en", 5.0, 10.0),
        make_window("ja", 0, 20.0),
    ]
    assert merge_windows(windows, duration_s=30.0).language == "en"
    assert merge_windows(windows, duration_s=30.0, language="ja").language == "ja"
    assert merge_windows(windows[2:], duration_s=10.0).language == "ja", "none spoken: the first"
    assert merge_windows([], duration_s=0.0).language == "en"
