"""OpenAI's fields that are lists or objects, in every spelling that its clients use."""

from __future__ import annotations

import pytest

from router.api.params import Chunking
from tests.support.forms import SEQUENTIAL, VERBOSE, Field, parse, refusal


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [("timestamp_granularities[]", "segment"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities", "segment")],
        [("timestamp_granularities[0]", "segment")],
        [("timestamp_granularities", '["segment"]')],
        [("timestamp_granularities", "[]")],
    ],
)
def test_segment_granularity_in_every_spelling_and_with_every_format(fields: list[Field]) -> None:
    assert parse(*fields) == parse()
    params = parse(*fields, VERBOSE)
    assert (params.words, params.segments) == (False, True)


@pytest.mark.parametrize(
    "fields",
    [
        [("timestamp_granularities[]", "word")],
        [("timestamp_granularities", "word")],
        [("timestamp_granularities", '["word"]')],
        [("timestamp_granularities[0]", "word"), ("timestamp_granularities[1]", "word")],
    ],
)
def test_word_granularity_alone_leaves_segments_out(fields: list[Field]) -> None:
    params = parse(*fields, VERBOSE)
    assert (params.words, params.segments, params.aligns) == (True, False, True)


@pytest.mark.parametrize(
    "fields",
    [
        [("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities", '["segment", "word"]')],
    ],
)
def test_both_granularities_list_both(fields: list[Field]) -> None:
    params = parse(*fields, VERBOSE)
    assert (params.words, params.segments) == (True, True)


@pytest.mark.parametrize("value", ["json", "text", "srt", "vtt"])
def test_words_need_verbose_json(value: str) -> None:
    error = refusal(("timestamp_granularities[]", "word"), ("response_format", value))
    assert error.param == "timestamp_granularities"
    assert "verbose_json" in error.message


@pytest.mark.parametrize("value", ["char", "", '["x"]', "[", "[1]", "[[]]"])
def test_other_granularities_are_refused(value: str) -> None:
    assert refusal(("timestamp_granularities[]", value)).param == "timestamp_granularities"


@pytest.mark.parametrize("name", ["include[]", "include", "include[0]"])
def test_logprobs_are_included_in_json(name: str) -> None:
    assert parse((name, "logprobs")).logprobs
    assert parse((name, "logprobs"), ("stream", "true")).logprobs
    assert not parse().logprobs


@pytest.mark.parametrize("value", ["text", "srt", "verbose_json", "vtt"])
def test_logprobs_need_json(value: str) -> None:
    assert refusal(("include[]", "logprobs"), ("response_format", value)).param == "include"


def test_nothing_else_can_be_included() -> None:
    assert refusal(("include[]", "usage")).param == "include"


@pytest.mark.parametrize("fields", [[("chunking_strategy", "auto")], [("chunking_strategy", "")]])
def test_automatic_chunking_leaves_the_cuts_to_the_server(fields: list[Field]) -> None:
    assert parse(*fields) == parse()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("chunking_strategy[type]", "server_vad")], Chunking()),
        ([("chunking_strategy", '{"type": "server_vad"}')], Chunking()),
        (
            [
                ("chunking_strategy[silence_duration_ms]", "500"),
                ("chunking_strategy[type]", "server_vad"),
                ("chunking_strategy[threshold]", "0"),
                ("chunking_strategy[prefix_padding_ms]", "0"),
            ],
            Chunking(0.0, 0, 500),
        ),
        (
            [("chunking_strategy", '{"type": "server_vad", "threshold": 0.3}')],
            Chunking(threshold=0.3),
        ),
    ],
)
def test_chunking_by_voice_in_every_spelling(fields: list[Field], expected: Chunking) -> None:
    assert parse(*fields).chunking == expected
    assert parse(*reversed(fields)).chunking == expected


@pytest.mark.parametrize(
    "fields",
    [
        [("chunking_strategy", "server")],
        [("chunking_strategy", "{")],
        [("chunking_strategy", "{}")],
        [("chunking_strategy", '{"type": null}')],
        [("chunking_strategy[threshold]", "0.5")],
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[threshold]", "2")],
        [
            ("chunking_strategy[type]", "server_vad"),
            ("chunking_strategy[silence_duration_ms]", "x"),
        ],
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[eagerness]", "1")],
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy", "auto")],
        [("chunking_strategy[type]", "server_vad"), SEQUENTIAL],
    ],
)
def test_other_chunking_is_refused(fields: list[Field]) -> None:
    assert (refusal(*fields).param or "").startswith("chunking_strategy")


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_a_stream_can_be_asked_for(value: str) -> None:
    assert parse(("stream", value)).stream


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_stream_is_a_boolean(value: str) -> None:
    assert refusal(("stream", value)).param == "stream"


def test_keywords_are_hotwords() -> None:
    assert parse(("keywords[]", "Zoë"), ("keywords[]", "kiwi")).hotwords == "Zoë, kiwi"
    assert parse(("keywords", '["a"]'), ("hotwords", "b")).hotwords == "b, a"
    assert refusal(("keywords", '[{"a": 1}]')).param == "keywords"


def test_half_a_character_never_becomes_a_text() -> None:
    hotwords = parse(("keywords", '["\\ud800"]')).hotwords
    assert hotwords == '["\\ud800"]', "no list of texts, so it is one text as it came"
