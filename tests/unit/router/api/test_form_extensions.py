"""Fields that are not OpenAI's: openai/whisper's, vLLM's and our own."""

from __future__ import annotations

import pytest

from cluster.common.errors import InvalidRequestError
from cluster.common.messages import QualityGates
from router.api.forms import parse_translation
from router.api.params import SequentialOptions
from router.api.request_fields import FIELDS
from tests.support.forms import LANGUAGES, SEQUENTIAL, Field, parse, refusal


def test_decoding_options_of_openai_whisper() -> None:
    params = parse(
        SEQUENTIAL,
        ("prompt", "p"),
        ("beam_size", "5"),
        ("patience", "2"),
        ("best_of", "3"),
        ("length_penalty", "0"),
        ("condition_on_previous_text", "false"),
        ("carry_initial_prompt", "true"),
        ("hallucination_silence_threshold", "2.5"),
        ("clip_timestamps", "0,1.5,3"),
        ("compression_ratio_threshold", "none"),
        ("logprob_threshold", "-0.5"),
        ("no_speech_threshold", "null"),
    )
    assert (params.beam_size, params.patience, params.best_of) == (5, 2.0, 3)
    assert params.length_penalty == 0.0
    assert params.sequential == SequentialOptions(False, True, 2.5, (0.0, 1.5, 3.0))
    assert params.gates == QualityGates(None, -0.5, None, keep="last")
    assert params.aligns, "silence around hallucinations is found by words"


def test_an_attempt_is_kept_as_the_mode_has_it() -> None:
    assert parse().gates.keep == "best"
    assert parse(SEQUENTIAL).gates == QualityGates(keep="last")


def test_fallback_can_be_turned_off() -> None:
    assert parse(("fallback", "false")).temperatures == (0.0,)
    assert parse(("temperature", "0.3")).temperatures == (0.3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_size", "0"),
        ("beam_size", "17"),
        ("best_of", "1.5"),
        ("patience", "0"),
        ("length_penalty", "1.1"),
        ("compression_ratio_threshold", "-1"),
        ("logprob_threshold", "0.1"),
        ("no_speech_threshold", "2"),
        ("no_speech_threshold", ""),
        ("decoding", "magic"),
        ("fallback", "perhaps"),
    ],
)
def test_bounds_of_extensions(name: str, value: str) -> None:
    error = refusal((name, value))
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("condition_on_previous_text", "5"),
        ("carry_initial_prompt", "5"),
        ("carry_initial_prompt", "true"),  # without a prompt
        ("hallucination_silence_threshold", "-1"),
        ("clip_timestamps", "3,1"),
        ("clip_timestamps", "-1"),
        ("clip_timestamps[]", "x"),
    ],
)
def test_bounds_of_what_sequential_mode_takes(name: str, value: str) -> None:
    assert refusal((name, value), SEQUENTIAL).param == name.removesuffix("[]")


@pytest.mark.parametrize(
    "fields",
    [
        [("clip_timestamps[]", "0"), ("clip_timestamps[]", "2")],
        [("clip_timestamps", "[0, 2.0]")],
        [("clip_timestamps", "0, 2")],
    ],
)
def test_clips_in_every_spelling(fields: list[Field]) -> None:
    assert parse(*fields, SEQUENTIAL).sequential.clip_timestamps == (0.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(([(field.name, "1")], field.name) for field in FIELDS.values() if field.only_sequential),
        ([("clip_timestamps[]", "1")], "clip_timestamps"),
        ([("beam_size", "5"), ("temperature", "0.2")], "beam_size"),
        ([("best_of", "5"), ("fallback", "false")], "best_of"),
        ([("fallback", "true"), ("temperature", "0.2")], "fallback"),
        ([("patience", "2")], "patience"),
        ([("length_penalty", "0.5")], "length_penalty"),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: list[Field], param: str) -> None:
    error = refusal(*fields)
    assert (error.param, error.code) == (param, "incompatible_parameters")


def test_what_vllm_s_benchmark_client_sends_is_taken() -> None:
    params = parse(
        ("temperature", "0.0"),
        ("max_completion_tokens", "128"),
        ("stream", "True"),
        ("language", "en"),
        ("stream_include_usage", "True"),
        ("stream_continuous_usage_stats", "True"),
    )
    assert params.stream
    assert params.max_completion_tokens == 128
    assert params.stream_include_usage
    assert params.stream_continuous_usage_stats


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_number_of_tokens_that_is_none_is_refused(value: str) -> None:
    assert refusal(("max_completion_tokens", value)).param == "max_completion_tokens"


def test_a_translation_has_no_stream_and_so_no_usage_in_it() -> None:
    fields = [("model", "m"), ("max_completion_tokens", "5")]
    assert parse_translation(fields, LANGUAGES).max_completion_tokens == 5
    with pytest.raises(InvalidRequestError) as caught:
        parse_translation([*fields, ("stream_include_usage", "true")], LANGUAGES)
    assert caught.value.code == "unknown_parameter"
