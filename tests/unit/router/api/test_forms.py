"""Every field of the form: taken as documented, or refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from router.api.forms import parse_transcription, parse_translation
from router.api.params import LADDER, Chunking, TranscriptionParams
from router.api.request_fields import FIELDS, MAX_SEED, RequestField
from tests.support.forms import LANGUAGES, SEQUENTIAL, VERBOSE, Field, parse, refusal

NEVER_EMPTY = ("file", "model", "timestamp_granularities", "include")


def test_defaults() -> None:
    assert parse() == TranscriptionParams("whisper-1")
    assert parse().temperatures == LADDER


def test_all_fields_in_any_order() -> None:
    fields = [
        ("timestamp_granularities[]", "segment"),
        ("seed", "7"),
        ("temperature", "0.4"),
        ("stream", "false"),
        ("prompt", "Zoë, naïve"),
        ("response_format", "verbose_json"),
        ("language", "de"),
        ("model", "m"),
    ]
    expected = TranscriptionParams(
        "m",
        language="de",
        prompt="Zoë, naïve",
        temperature=0.4,
        seed=7,
        response_format="verbose_json",
    )
    assert parse_transcription(fields, LANGUAGES) == expected
    assert parse_transcription(reversed(fields), LANGUAGES) == expected


@pytest.mark.parametrize("value", ["de", "DE", " german ", "German"])
def test_a_language_is_a_code_or_an_english_name(value: str) -> None:
    assert parse(("language", value)).language == "de"


def test_an_alias_of_a_language_is_known() -> None:
    assert parse(("language", "Burmese")).language == "my"


@pytest.mark.parametrize(
    "field",
    [field for field in FIELDS.values() if field.may_be_empty and field.name not in NEVER_EMPTY],
    ids=lambda field: field.name,
)
def test_an_empty_field_is_as_if_it_had_not_been_sent(field: RequestField) -> None:
    decoding = [SEQUENTIAL] if field.only_sequential else []
    assert parse((field.spelling, ""), *decoding) == parse(*decoding)


@pytest.mark.parametrize("value", ["klingon", "e n", "12", "auto"])
def test_an_unknown_language_is_refused(value: str) -> None:
    error = refusal(("language", value))
    assert (error.param, error.code) == ("language", "invalid_language_format")


def test_a_language_that_the_model_lacks_is_refused_with_those_it_has() -> None:
    error = refusal(("language", "ja"))
    assert isinstance(error, UnsupportedValueError)
    assert error.param == "language"
    assert "de, en, my" in error.message


@pytest.mark.parametrize("value", ["1.01", "-0.1", "nan", "inf", "warm", "0,5"])
def test_a_temperature_outside_0_to_1_is_refused(value: str) -> None:
    assert refusal(("temperature", value)).param == "temperature"


@pytest.mark.parametrize(("value", "expected"), [("0", 0.0), ("1", 1.0), ("0.2", 0.2), ("", 0.0)])
def test_a_temperature_from_0_to_1_is_taken(value: str, expected: float) -> None:
    assert parse(("temperature", value)).temperature == expected


@pytest.mark.parametrize("value", ["-1", "1.5", "x", str(MAX_SEED + 1), "9" * 5000, "²"])
def test_a_seed_that_is_no_whole_number_is_refused(value: str) -> None:
    assert refusal(("seed", value)).param == "seed"


@pytest.mark.parametrize("value", ["json", "text", "srt", "verbose_json", "vtt"])
def test_the_classic_formats_are_taken(value: str) -> None:
    assert parse(("response_format", value)).response_format == value
    assert parse(("response_format", value), ("stream", "true")).stream


def test_the_format_of_diarization_is_unsupported() -> None:
    error = refusal(("response_format", "diarized_json"))
    assert (error.param, error.code) == ("response_format", "unsupported_value")


@pytest.mark.parametrize("value", ["xml", "", "JSON"])
def test_formats_of_nobody_are_invalid(value: str) -> None:
    error = refusal(("response_format", value))
    assert (error.param, error.code) == ("response_format", "invalid_value")
    assert "'verbose_json'" in error.message


@pytest.mark.parametrize(
    "field",
    [
        ("known_speaker_names[]", "Ann"),
        ("known_speaker_references[]", "data:audio/wav;base64,AA"),
        ("languages[]", "en"),
        ("languages", "en"),
    ],
)
def test_what_openai_has_and_this_server_lacks_is_refused_by_name(field: Field) -> None:
    error = refusal(field)
    assert isinstance(error, UnsupportedValueError)
    assert error.code == "unsupported_value"
    assert error.param == field[0].partition("[")[0]
    assert error.param in error.message


@pytest.mark.parametrize(
    "name", ["beams", "prompt[]", "model[0]", "", "timestamp_granularities[x]", "file[]"]
)
def test_unknown_fields_are_refused_by_name(name: str) -> None:
    error = refusal((name, "1"))
    assert (error.param, error.code) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    "name", [field.name for field in FIELDS.values() if field.kind.shape == "text"]
)
def test_a_scalar_field_may_come_once(name: str) -> None:
    assert refusal((name, "1"), (name, "1")).param == name


@pytest.mark.parametrize("fields", [[], [("model", "")], [("model", "  ")]])
def test_a_model_is_required(fields: list[Field]) -> None:
    for check in (parse_transcription, parse_translation):
        with pytest.raises(InvalidRequestError) as caught:
            check(fields, LANGUAGES)
        assert caught.value.param == "model"


NAMES = [
    *FIELDS,
    *(field.spelling for field in FIELDS.values()),
    "chunking_strategy[threshold]",
]
VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["true", "none", "0", "0.5", "[", "{", "[" * 5000, "word", "sequential", "\ud800"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    ).map(json.dumps),
    st.dictionaries(
        st.sampled_from(["type", "threshold"]), st.none() | st.floats() | st.text()
    ).map(json.dumps),
)


@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=10), VALUES), max_size=5))
def test_any_form_is_either_taken_or_refused_with_a_400(fields: list[Field]) -> None:
    for check in (parse_transcription, parse_translation):
        try:
            params = check([("model", "m"), *fields], LANGUAGES)
        except InvalidRequestError:
            continue
        assert params.model == "m"
        assert params.temperatures[0] <= 1.0


def test_a_translation_takes_the_same_apart_from_what_it_cannot_have() -> None:
    fields = [("model", "m"), ("prompt", "p"), ("response_format", "srt"), ("beam_size", "2")]
    params = parse_translation(fields, LANGUAGES)
    expected = TranscriptionParams("m", prompt="p", response_format="srt", beam_size=2)
    assert params == replace(expected, task="translate")


@pytest.mark.parametrize(
    "name", ["stream", "timestamp_granularities[]", "include[]", "chunking_strategy"]
)
def test_a_translation_has_neither_stream_nor_granularities(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_translation([("model", "m"), (name, "en")], LANGUAGES)
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_a_translation_may_be_told_which_language_is_spoken() -> None:
    assert parse_translation([("model", "m"), ("language", "German")], LANGUAGES).language == "de"


def test_a_model_that_knows_english_only_cannot_translate() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        parse_translation([("model", "m")], ("en",))
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_value")


def test_messages_repeat_only_a_piece_of_what_came() -> None:
    assert len(refusal(("x" * 60_000, "1")).message) < 1000
    assert len(refusal(("language", "x\n" * 30_000)).message) < 400


# ---- lists and objects, in every spelling that OpenAI's clients use


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
