"""A form's fields, checked one by one and against each other, become `TranscriptionParams`.

Takes (name, text) pairs in any order. A field that this server does not know, does not offer, or
could not honour beside the others is refused by name: a client learns from a 400 what it would
otherwise miss in the text. Single values are parsed by `router.api.fields`. Knows nothing of
multipart parsing or of HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import cast

from cluster.errors import InvalidRequestError, UnsupportedValueError
from cluster.messages import QualityGates, Task
from router.api.chunking import chunking
from router.api.fields import (
    FormShape,
    FormValues,
    boolean,
    choice,
    collect,
    conflict,
    language,
    number,
    repeated,
    shown,
    threshold,
    times,
    whole_number,
)
from router.api.params import (
    DECODINGS,
    PARALLEL_GATES,
    RESPONSE_FORMATS,
    Decoding,
    ResponseFormat,
    SequentialOptions,
    StreamUsage,
    TranscriptionParams,
)

OTHER_FORMATS = ("diarized_json",)  # OpenAI's, not offered here
GRANULARITIES = ("word", "segment")

# Ours, beside OpenAI's fields; clients send them as `extra_body`.
EXTENSION_FIELDS = (
    "hotwords",
    "seed",
    "decoding",
    "fallback",
    "beam_size",
    "patience",
    "best_of",
    "length_penalty",
    "max_completion_tokens",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
    "condition_on_previous_text",
    "carry_initial_prompt",
    "hallucination_silence_threshold",
)
# vLLM's, which its benchmark client and GuideLLM send beside `stream`.
STREAM_USAGE_FIELDS = ("stream_include_usage", "stream_continuous_usage_stats")
SEQUENTIAL_FIELDS = (
    "condition_on_previous_text",
    "carry_initial_prompt",
    "hallucination_silence_threshold",
    "clip_timestamps",
)
LATER_FIELDS = ("languages", "known_speaker_names", "known_speaker_references")
TRANSCRIPTION_FORM = FormShape(
    scalars=(
        "model",
        "language",
        "prompt",
        "response_format",
        "temperature",
        "stream",
        *STREAM_USAGE_FIELDS,
        *EXTENSION_FIELDS,
    ),
    lists=("timestamp_granularities", "include", "keywords", "clip_timestamps"),
    objects=("chunking_strategy",),
    later=LATER_FIELDS,
)
TRANSLATION_FORM = FormShape(
    scalars=("model", "language", "prompt", "response_format", "temperature", *EXTENSION_FIELDS),
    lists=("clip_timestamps",),
)

MAX_SEED = 2**63 - 1
MAX_CANDIDATES = 16  # beams, or samples: query rows of one sequence
MIN_PATIENCE = 0.1
MAX_PATIENCE = 8.0
MAX_TOKENS = 1_000_000  # more than any window's text context, which bounds it anyway
MAX_COMPRESSION_RATIO = 1000.0  # zlib cannot do better
MIN_LOGPROB = -100.0
MAX_SILENCE_S = 3600.0
MAX_CLIP_S = 7 * 24 * 3600.0


def requested_model(fields: Iterable[tuple[str, str]]) -> str:
    """The model that a form names, before anything else of it is checked.

    Raises:
        InvalidRequestError: it names none, or several.
    """
    names = [value.strip() for name, value in fields if name == "model"]
    if len(names) > 1:
        raise repeated("model")
    if not names or not names[0]:
        raise InvalidRequestError("you must provide a 'model' parameter", param="model")
    return names[0]


def parse_transcription(
    fields: Iterable[tuple[str, str]], languages: Collection[str]
) -> TranscriptionParams:
    """Check a form of /v1/audio/transcriptions.

    Args:
        fields: names and texts of all parts but the file.
        languages: codes that the model knows.

    Raises:
        UnsupportedValueError: a field or value of OpenAI's that is not offered here.
        InvalidRequestError: an unknown or repeated field, a value that is no such thing, or one
            that does not go with the others.
    """
    fields = tuple(fields)
    model = requested_model(fields)
    values = collect(fields, TRANSCRIPTION_FORM)
    params = _common(model, values, "transcribe")
    words, segments = _granularities(values, params.response_format)
    return replace(
        params,
        language=language(values.scalars.get("language"), languages),
        hotwords=_hotwords(values),
        stream=boolean("stream", values.text("stream")) or False,
        stream_usage=_stream_usage(values),
        words=words,
        segments=segments,
        logprobs=_logprobs(values, params.response_format),
        chunking=chunking(values.objects, params.decoding),
    )


def parse_translation(
    fields: Iterable[tuple[str, str]], languages: Collection[str]
) -> TranscriptionParams:
    """Check a form of /v1/audio/translations; see `parse_transcription`.

    `language`, the one that is spoken, is an extension of ours; OpenAI detects it always.

    Raises:
        UnsupportedValueError: the model knows English only.
    """
    fields = tuple(fields)
    model = requested_model(fields)
    values = collect(fields, TRANSLATION_FORM)
    params = _common(model, values, "translate")
    if len(languages) == 1:
        raise UnsupportedValueError(
            f"model {shown(model)} knows English only and cannot translate; "
            f"use /v1/audio/transcriptions",
            param="model",
        )
    return replace(params, language=language(values.scalars.get("language"), languages))


def _common(model: str, values: FormValues, task: Task) -> TranscriptionParams:
    """What both endpoints take."""
    decoding = cast(Decoding, choice("decoding", values.text("decoding"), DECODINGS) or "parallel")
    fallback = boolean("fallback", values.text("fallback"))
    temperature = number("temperature", values.text("temperature"), 0.0, 1.0) or 0.0
    if fallback and temperature > 0:
        raise conflict("fallback", "'fallback' climbs from temperature 0; leave 'temperature' out")
    params = TranscriptionParams(
        model=model,
        prompt=values.scalars.get("prompt") or None,
        hotwords=values.text("hotwords"),
        temperature=temperature,
        fallback=fallback is not False,
        seed=whole_number("seed", values.text("seed"), 0, MAX_SEED),
        response_format=_response_format(values.scalars.get("response_format")),
        task=task,
        decoding=decoding,
        sequential=_sequential(values, decoding),
        gates=_gates(values, decoding),
        max_completion_tokens=whole_number(
            "max_completion_tokens", values.text("max_completion_tokens"), 1, MAX_TOKENS
        ),
    )
    return _with_candidates(params, values)


def _with_candidates(params: TranscriptionParams, values: FormValues) -> TranscriptionParams:
    """Beams and samples: refused where they would have no effect."""
    beams = whole_number("beam_size", values.text("beam_size"), 1, MAX_CANDIDATES)
    samples = whole_number("best_of", values.text("best_of"), 1, MAX_CANDIDATES)
    patience = number("patience", values.text("patience"), MIN_PATIENCE, MAX_PATIENCE)
    length_penalty = number("length_penalty", values.text("length_penalty"), 0.0, 1.0)
    if beams is not None and beams > 1 and params.temperature > 0:
        raise conflict("beam_size", "'beam_size' needs temperature 0; above it, use 'best_of'")
    if samples is not None and samples > 1 and params.temperatures == (0.0,):
        raise conflict("best_of", "'best_of' needs a temperature above 0, or 'fallback'")
    if patience is not None and (beams or 1) == 1:
        raise conflict("patience", "'patience' needs a 'beam_size' above 1")
    if length_penalty is not None and max(beams or 1, samples or 1) == 1:
        raise conflict("length_penalty", "'length_penalty' needs 'beam_size' or 'best_of' above 1")
    return replace(
        params,
        beam_size=beams or 1,
        best_of=samples or 1,
        patience=patience or 1.0,
        length_penalty=length_penalty,
    )


def _gates(values: FormValues, decoding: Decoding) -> QualityGates:
    usual = QualityGates() if decoding == "sequential" else PARALLEL_GATES

    def limit(name: str, low: float, high: float, default: float | None) -> float | None:
        return threshold(name, values.scalars.get(name), low, high, default)

    return replace(
        usual,
        compression_ratio=limit(
            "compression_ratio_threshold", 0.0, MAX_COMPRESSION_RATIO, usual.compression_ratio
        ),
        avg_logprob=limit("logprob_threshold", MIN_LOGPROB, 0.0, usual.avg_logprob),
        no_speech_prob=limit("no_speech_threshold", 0.0, 1.0, usual.no_speech_prob),
    )


def _sequential(values: FormValues, decoding: Decoding) -> SequentialOptions:
    if decoding != "sequential":
        for name in values.sent(SEQUENTIAL_FIELDS):
            raise conflict(name, f"'{name}' needs decoding=sequential")
        return SequentialOptions()
    conditions = boolean("condition_on_previous_text", values.text("condition_on_previous_text"))
    name = "hallucination_silence_threshold"
    carries = boolean("carry_initial_prompt", values.text("carry_initial_prompt")) or False
    if carries and not values.text("prompt"):
        raise conflict("carry_initial_prompt", "'carry_initial_prompt' needs a 'prompt'")
    return SequentialOptions(
        condition_on_previous_text=conditions is not False,
        carry_initial_prompt=carries,
        hallucination_silence_threshold=threshold(
            name, values.scalars.get(name), 0.0, MAX_SILENCE_S, None
        ),
        clip_timestamps=times(
            "clip_timestamps", values.lists.get("clip_timestamps", ()), MAX_CLIP_S
        ),
    )


def _stream_usage(values: FormValues) -> StreamUsage:
    """Without a stream, or the continuous one without the other, they do nothing, as in vLLM."""
    included, continuous = (boolean(name, values.text(name)) for name in STREAM_USAGE_FIELDS)
    if not included:
        return "end"
    return "each chunk" if continuous else "end chunk"


def _granularities(values: FormValues, response_format: ResponseFormat) -> tuple[bool, bool]:
    """(words, segments): segments unless words alone were asked for."""
    asked = _listed("timestamp_granularities", values, GRANULARITIES)
    if "word" not in asked:
        return False, True
    if response_format != "verbose_json":
        raise conflict(
            "timestamp_granularities",
            f"timestamp granularity 'word' needs response_format 'verbose_json', "
            f"not '{response_format}'",
        )
    return True, "segment" in asked


def _logprobs(values: FormValues, response_format: ResponseFormat) -> bool:
    wanted = "logprobs" in _listed("include", values, ("logprobs",))
    if wanted and response_format != "json":
        raise conflict(
            "include", f"'logprobs' needs response_format 'json', not '{response_format}'"
        )
    return wanted


def _listed(name: str, values: FormValues, choices: tuple[str, ...]) -> set[str]:
    """The items of a list field, each one of `choices`."""
    items = values.lists.get(name, [])
    for item in items:
        if item not in choices:
            offered = ", ".join(f"'{one}'" for one in choices)
            raise InvalidRequestError(
                f"{shown(item)} is none of the values of '{name}'; use {offered}",
                param=name,
                code="invalid_value",
            )
    return set(items)


def _hotwords(values: FormValues) -> str | None:
    """`hotwords`, and OpenAI's `keywords[]` behind them."""
    keywords = values.lists.get("keywords", [])
    for word in keywords:
        if not isinstance(word, str):
            raise InvalidRequestError(
                f"'keywords' must be texts, not {shown(word)}", param="keywords"
            )
    words = [values.text("hotwords") or "", *keywords]
    return ", ".join(word.strip() for word in words if word.strip()) or None


def _response_format(value: str | None) -> ResponseFormat:
    if value is None:
        return "json"
    if value in OTHER_FORMATS:
        raise UnsupportedValueError(
            f"response_format '{value}' is not supported by this server", param="response_format"
        )
    if value not in RESPONSE_FORMATS:
        offered = ", ".join(f"'{name}'" for name in RESPONSE_FORMATS)
        raise InvalidRequestError(
            f"{shown(value)} is no response_format; use one of {offered}",
            param="response_format",
            code="invalid_value",
        )
    return cast(ResponseFormat, value)
