"""Every field of the form: taken as documented, or refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.api.forms import parse_transcription, parse_translation
from router.api.params import LADDER, TranscriptionParams
from router.api.request_fields import FIELDS, MAX_SEED, RequestField
from tests.support.forms import LANGUAGES, SEQUENTIAL, Field, parse, refusal

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
