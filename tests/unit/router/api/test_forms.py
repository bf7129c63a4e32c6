"""Every field of the form: taken as documented, or refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from cluster.common.messages import QualityGates
from router.api.forms import parse_alignment, parse_transcription, parse_translation
from router.api.kinds import RequestField
from router.api.params import LADDER, Chunking, SequentialOptions, TranscriptionParams
from router.api.request_fields import FIELDS, MAX_SEED, fields_of
from tests.support.forms import LANGUAGES, SEQUENTIAL, VERBOSE, Field, parse, refusal

TAKEN = fields_of("transcribe")
NEVER_EMPTY = (
    *("file", "model", "languages", "timestamp_granularities", "include"),
    *("channel_names", "known_speaker_names", "known_speaker_references"),
)


def test_defaults() -> None:
    assert parse() == TranscriptionParams("whisper-1")
    assert parse().temperatures == LADDER


SPELT: list[tuple[Field, str, object]] = [
    *((("language", text), "language", "de") for text in ("de", "DE", " german ", "German")),
    (("language", "Burmese"), "language", "my"),
    *((("temperature", text), "temperature", float(text or 0)) for text in ("0", "1", "0.2", "")),
    *((("stream", text), "stream", True) for text in ("true", "True", "1")),
    *((("include" + end, "logprobs"), "logprobs", True) for end in ("", "[]", "[0]")),
    *((("chunking_strategy", text), "chunking", None) for text in ("auto", "")),
    (("keywords", '["Zoë", "kiwi"]'), "hotwords", "Zoë, kiwi"),
    (("keywords", '["\\ud800"]'), "hotwords", '["\\ud800"]'),  # no texts, so one text as it came
    (("languages", '["de", "English"]'), "languages", ("de", "en")),
    (("fallback", "false"), "temperatures", (0.0,)),
    (("temperature", "0.3"), "temperatures", (0.3,)),
]


@pytest.mark.parametrize(("field", "name", "expected"), SPELT)
def test_a_value_may_be_spelt_in_many_ways(field: Field, name: str, expected: object) -> None:
    assert getattr(parse(field), name) == expected


@pytest.mark.parametrize(
    "field",
    [field for field in TAKEN.values() if field.may_be_empty and field.name not in NEVER_EMPTY],
    ids=lambda field: field.name,
)
def test_an_empty_field_is_as_if_it_had_not_been_sent(field: RequestField) -> None:
    decoding = [SEQUENTIAL] if field.only_sequential else []
    assert parse((field.spelling, ""), *decoding) == parse(*decoding)


@pytest.mark.parametrize("field", [("language", "ja"), ("languages", '["de", "ja"]')])
def test_a_language_that_the_model_lacks_is_refused_with_those_it_has(field: Field) -> None:
    error = refusal(field)
    assert isinstance(error, UnsupportedValueError)
    assert error.param == field[0]
    assert "de, en, my" in error.message


@pytest.mark.parametrize(
    "name", [field.name for field in TAKEN.values() if field.kind.shape == "text"]
)
def test_a_scalar_field_may_come_once(name: str) -> None:
    assert refusal((name, "1"), (name, "1")).param == name


@pytest.mark.parametrize("fields", [[], [("model", "")], [("model", "  ")]])
def test_a_model_is_required(fields: list[Field]) -> None:
    for check in (parse_transcription, parse_translation):
        with pytest.raises(InvalidRequestError) as caught:
            check(fields, LANGUAGES)
        assert caught.value.param == "model"


NAMES = [*FIELDS, *(field.spelling for field in TAKEN.values()), "chunking_strategy[threshold]"]
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
    "name",
    [
        "stream_include_usage",
        "include[]",
        "chunking_strategy",
    ],
)
def test_a_translation_takes_neither_usage_nor_what_needs_the_spoken_words(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_translation([("model", "m"), (name, "en")], LANGUAGES)
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_messages_repeat_only_a_piece_of_what_came() -> None:
    assert len(refusal(("x" * 60_000, "1")).message) < 1000
    assert len(refusal(("language", "x\n" * 30_000)).message) < 400


# ---- lists and objects, in every spelling that OpenAI's clients use

SEGMENT, WORD, BOTH = (False, True), (True, False), (True, True)


@pytest.mark.parametrize(
    ("texts", "listed"),
    [
        ({}, SEGMENT),
        ({"[]": "segment"}, SEGMENT),
        ({"": "segment"}, SEGMENT),
        ({"[0]": "segment"}, SEGMENT),
        ({"": '["segment"]'}, SEGMENT),
        ({"": "[]"}, SEGMENT),
        ({"[]": "word"}, WORD),
        ({"": "word"}, WORD),
        ({"": '["word"]'}, WORD),
        ({"[0]": "word", "[1]": "word"}, WORD),
        ({"[0]": "word", "[]": "segment"}, BOTH),
        ({"": '["segment", "word"]'}, BOTH),
    ],
)
def test_granularities_in_every_spelling(texts: dict[str, str], listed: tuple[bool, bool]) -> None:
    fields = [(f"timestamp_granularities{end}", text) for end, text in texts.items()]
    params = parse(*fields, VERBOSE)
    assert (params.words, params.segments) == listed
    assert params.aligns is params.words
    assert listed != SEGMENT or parse(*fields) == parse(), "with every format"


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


WAV = "data:audio/wav;base64,"
# Fields and the values that each may not have, with the code of the refusal.
REFUSED: list[tuple[str, list[str], str | None]] = [
    ("language", ["klingon", "e n", "12", "auto"], "invalid_language_format"),
    ("temperature", ["1.01", "-0.1", "nan", "inf", "warm", "0,5"], None),
    ("seed", ["-1", "1.5", "x", str(MAX_SEED + 1), "9" * 5000, "²"], None),
    ("response_format", ["xml", "", "JSON"], "invalid_value"),
    ("known_speaker_names[]", ["", " ", "a\nb", "x" * 65], None),
    ("channel_names[]", ["", "a\x00b"], None),
    ("channels", ["both"], "invalid_value"),
    ("num_speakers", ["0", "33", "two"], None),
    ("diarize", ["perhaps"], None),
    ("known_speaker_references[]", ["http://a/b.wav", "x", "data:audio/wav,A"], "invalid_value"),
    ("known_speaker_references[]", ["data:text/plain;base64,AAAA"], "invalid_value"),
    ("known_speaker_references[]", [f"{WAV}AA", f"{WAV}A A=", WAV], "invalid_value"),
    ("languages[]", ["klingon", ""], "invalid_language_format"),
    ("timestamp_granularities[]", ["char", "", '["x"]', "["], "invalid_value"),
    ("timestamp_granularities[]", ["[1]", "[[]]"], None),
    ("include[]", ["usage"], "invalid_value"),
    ("stream", ["maybe", "2"], None),
    ("keywords", ['[{"a": 1}]'], None),
    ("beam_size", ["0", "17"], None),
    ("best_of", ["1.5"], None),
    ("patience", ["0"], None),
    ("length_penalty", ["1.1"], None),
    ("compression_ratio_threshold", ["-1"], None),
    ("logprob_threshold", ["0.1"], None),
    ("no_speech_threshold", ["2", ""], None),
    ("decoding", ["magic"], "invalid_value"),
    ("fallback", ["perhaps"], None),
    ("max_completion_tokens", ["0", "-1", "many", "1.5"], None),
    ("condition_on_previous_text", ["5"], None),
    ("carry_initial_prompt", ["5"], None),
    ("hallucination_silence_threshold", ["-1"], None),
    ("clip_timestamps", ["3,1", "-1"], None),
    ("clip_timestamps[]", ["x"], None),
]


@pytest.mark.parametrize(("name", "values", "code"), REFUSED)
def test_a_value_that_is_no_such_thing_is_refused_by_the_fields_name(
    name: str, values: list[str], code: str | None
) -> None:
    field = name.removesuffix("[]")
    decoding = [SEQUENTIAL] if field in FIELDS and FIELDS[field].only_sequential else []
    for value in values:
        error = refusal((name, value), *decoding)
        assert error.param == field
        assert error.code == code
        assert isinstance(error, UnsupportedValueError) is (code == "unsupported_value")
        assert value[:20] in error.message or field in error.message


@pytest.mark.parametrize(
    "name", ["beams", "prompt[]", "model[0]", "", "timestamp_granularities[x]", "file[]"]
)
def test_unknown_fields_are_refused_by_name(name: str) -> None:
    error = refusal((name, "1"))
    assert (error.param, error.code) == (name, "unknown_parameter")


WORDS = ("timestamp_granularities[]", "word")
LOGPROBS = ("include[]", "logprobs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(([(field.name, "1")], field.name) for field in TAKEN.values() if field.only_sequential),
        *(([WORDS, ("response_format", one)], WORDS[0]) for one in ("json", "text", "srt", "vtt")),
        *(([LOGPROBS, ("response_format", one)], LOGPROBS[0]) for one in ("text", "srt", "vtt")),
        ([LOGPROBS, VERBOSE], "include"),
        ([("clip_timestamps[]", "1")], "clip_timestamps"),
        ([("carry_initial_prompt", "true"), SEQUENTIAL], "carry_initial_prompt"),
        ([("beam_size", "5"), ("temperature", "0.2")], "beam_size"),
        ([("best_of", "5"), ("fallback", "false")], "best_of"),
        ([("fallback", "true"), ("temperature", "0.2")], "fallback"),
        ([("patience", "2")], "patience"),
        ([("language", "en"), ("languages[]", "de")], "languages"),
        ([("length_penalty", "0.5")], "length_penalty"),
    ],
)
def test_what_would_have_no_effect_beside_the_others_is_refused(
    fields: list[Field], param: str
) -> None:
    error = refusal(*fields)
    assert (error.param, error.code) == (param.removesuffix("[]"), "incompatible_parameters")


# ---- fields that are not OpenAI's


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


@pytest.mark.parametrize("text", ["[0, 2.0]", "0, 2"])
def test_clips_are_a_json_list_or_a_text_with_commas(text: str) -> None:
    assert parse(("clip_timestamps", text), SEQUENTIAL).sequential.clip_timestamps == (0.0, 2.0)


def test_a_known_text_comes_as_a_text_or_in_lines() -> None:
    model = ("model", "whisper-1")
    text = parse_alignment([model, ("text", "One.\n\nTwo."), ("language", "de")], LANGUAGES)
    assert (text.known_lines, text.language) == (("One.", "", "Two."), "de")
    assert text.aligns
    lines = parse_alignment([model, ("lines[]", "One."), ("lines[]", "Two.")], LANGUAGES)
    assert lines.known_lines == ("One.", "Two.")
    assert parse_alignment([model, ("lines", '["a"]'), ("response_format", "srt")], LANGUAGES)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([], "text"),
        ([("text", " \n ")], "text"),
        ([("text", "a"), ("lines[]", "a")], "lines"),
        ([("text", "a"), ("response_format", "verbose_json")], "response_format"),
        ([("text", "a"), ("temperature", "0.5")], "temperature"),
        ([("text", "a"), ("stream", "true")], "stream"),
        ([("text", "a"), ("language", "xx")], "language"),
    ],
)
def test_what_is_no_alignment_is_refused_by_name(fields: list[Field], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_alignment([("model", "whisper-1"), *fields], LANGUAGES)
    assert refused.value.param == param
