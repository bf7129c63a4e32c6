"""Every field of the form: taken as documented, or refused by its name."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.openapi import FORM_PROPERTIES
from router.schemas import (
    LIST_FIELDS,
    MAX_SEED,
    SCALAR_FIELDS,
    TranscriptionParams,
    parse_transcription,
)

LANGUAGES = ("en", "de", "my")


def parse(*fields: tuple[str, str]) -> TranscriptionParams:
    return parse_transcription([("model", "whisper-1"), *fields], LANGUAGES)


def refusal(*fields: tuple[str, str]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(*fields)
    return caught.value


def test_defaults() -> None:
    assert parse() == TranscriptionParams("whisper-1")


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
    expected = TranscriptionParams("m", "de", "Zoë, naïve", 0.4, 7, "verbose_json")
    assert parse_transcription(fields, LANGUAGES) == expected
    assert parse_transcription(reversed(fields), LANGUAGES) == expected


@pytest.mark.parametrize("value", ["de", "DE", " german ", "German"])
def test_a_language_is_a_code_or_an_english_name(value: str) -> None:
    assert parse(("language", value)).language == "de"


def test_an_alias_of_a_language_is_known() -> None:
    assert parse(("language", "Burmese")).language == "my"


def test_an_empty_language_or_prompt_is_none() -> None:
    assert parse(("language", ""), ("prompt", "")) == parse()


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


@pytest.mark.parametrize("value", ["srt", "vtt", "diarized_json"])
def test_formats_of_openai_that_are_not_offered_are_unsupported(value: str) -> None:
    error = refusal(("response_format", value))
    assert (error.param, error.code) == ("response_format", "unsupported_value")
    assert "'verbose_json'" in error.message


@pytest.mark.parametrize("value", ["xml", "", "JSON"])
def test_formats_of_nobody_are_invalid(value: str) -> None:
    error = refusal(("response_format", value))
    assert (error.param, error.code) == ("response_format", "invalid_value")


@pytest.mark.parametrize(
    "field",
    [
        ("include[]", "logprobs"),
        ("include", "logprobs"),
        ("chunking_strategy", "auto"),
        ("chunking_strategy[type]", "server_vad"),
        ("known_speaker_names[]", "Ann"),
        ("known_speaker_references[]", "data:audio/wav;base64,AA"),
        ("languages[]", "en"),
        ("keywords[]", "kiwi"),
        ("hotwords", "kiwi"),
        ("stream", "true"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities", '["segment", "word"]'),
    ],
)
def test_what_openai_has_and_this_server_lacks_is_refused_by_name(field: tuple[str, str]) -> None:
    error = refusal(field)
    assert isinstance(error, UnsupportedValueError)
    assert error.code == "unsupported_value"
    assert error.param == field[0].partition("[")[0]
    assert error.param in error.message or "granularity" in error.message


@pytest.mark.parametrize(
    "name", ["beam_size", "prompt[]", "model[0]", "", "timestamp_granularities[x]", "file[]"]
)
def test_unknown_fields_are_refused_by_name(name: str) -> None:
    error = refusal((name, "1"))
    assert (error.param, error.code) == (name, "unknown_parameter")


@pytest.mark.parametrize("name", [name for name in SCALAR_FIELDS if name != "model"])
def test_a_scalar_field_may_come_once(name: str) -> None:
    value = {"response_format": "json", "stream": "false", "language": "en"}.get(name, "1")
    assert refusal((name, value), (name, value)).param == name


def test_the_model_may_come_once() -> None:
    assert refusal(("model", "again")).param == "model"


@pytest.mark.parametrize("fields", [[], [("model", "")], [("model", "  ")]])
def test_a_model_is_required(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_transcription(fields, LANGUAGES)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "fields",
    [
        [("timestamp_granularities[]", "segment"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities", "segment")],
        [("timestamp_granularities[0]", "segment")],
        [("timestamp_granularities", '["segment"]')],
        [("timestamp_granularities", "[]")],
    ],
)
def test_segment_granularity_in_every_spelling(fields: list[tuple[str, str]]) -> None:
    assert parse(*fields) == parse()


@pytest.mark.parametrize("value", ["char", "", '["x"]', "[", "[1]"])
def test_other_granularities_are_refused(value: str) -> None:
    assert refusal(("timestamp_granularities[]", value)).param == "timestamp_granularities"


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_stream_is_a_boolean(value: str) -> None:
    assert refusal(("stream", value)).param == "stream"


def test_messages_repeat_only_a_piece_of_what_came() -> None:
    assert len(refusal(("x" * 60_000, "1")).message) < 400
    assert len(refusal(("language", "x\n" * 30_000)).message) < 400


def test_the_documentation_names_exactly_the_fields_that_are_taken() -> None:
    listed = {f"{name}[]" for name in LIST_FIELDS}
    assert set(FORM_PROPERTIES) == {"file", *SCALAR_FIELDS, *listed}
