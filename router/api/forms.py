"""Parse the fields of a request into `TranscriptionParams`.

Takes (name, text) pairs in any order and in every spelling that OpenAI's clients use: `name` for a
text; `name[]` and `name[0]` for lists; `name[key]` for objects; JSON for both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from cluster.common.messages import QualityGates
from router.api.documents import repeated
from router.api.kinds import SHOWN, RequestField, shown
from router.api.params import Operation, TranscriptionParams, Way
from router.api.request_fields import FIELDS, fields_of

Pairs = Iterable[tuple[str, str]]

ALIGNED_FORMATS = ("json", "srt", "vtt")


def requested_model(pairs: Pairs) -> str:
    """The form's model; checks no other field. Raises InvalidRequestError."""
    names = [text.strip() for name, text in pairs if name == "model"]
    if len(names) > 1:
        raise repeated("model")
    if not names or not names[0]:
        raise InvalidRequestError("you must provide a 'model' parameter", param="model")
    return names[0]


def parse_transcription(
    pairs: Pairs, languages: Collection[str], task: Operation = "transcribe"
) -> TranscriptionParams:
    """Check the fields of an audio endpoint. `languages` are the model's.

    Raises UnsupportedValueError if the model cannot do what is asked, else InvalidRequestError.
    """
    pairs = tuple(pairs)
    model = requested_model(pairs)
    sent = collect(pairs, fields_of(task))
    values = {
        name: FIELDS[name].kind.parse(name, content)
        for name, content in sent.items()
        if not (FIELDS[name].may_be_empty and isinstance(content, str) and not content.strip())
    }
    if task == "align":
        params = _aligning(TranscriptionParams(model), values)
    else:
        params = _with_values(TranscriptionParams(model, task=task), values)
    check_model(params, languages)
    for rule in (_decoding_conflicts, _search_conflicts, _answer_conflicts, _speaker_conflicts):
        for name, message in rule(params, values):
            raise InvalidRequestError(message, param=name, code="incompatible_parameters")
    return params


# `language`, the spoken one, is our extension of translations: OpenAI always detects it.
parse_translation = partial(parse_transcription, task="translate")
parse_alignment = partial(parse_transcription, task="align")


def _aligning(params: TranscriptionParams, values: Mapping[str, Any]) -> TranscriptionParams:
    if "text" in values and "lines" in values:
        raise InvalidRequestError(
            "'text' and 'lines' are two forms of the same; send only one of them",
            param="lines",
            code="incompatible_parameters",
        )
    lines = tuple(values.get("lines", ())) or tuple(values.get("text", "").splitlines())
    if not any(line.strip() for line in lines):
        raise InvalidRequestError("send the known text as 'text' or 'lines'", param="text")
    name = "response_format"
    shape = values.get(name, "json")
    if shape not in ALIGNED_FORMATS:
        raise InvalidRequestError(
            f"'{name}' of an alignment is {', '.join(ALIGNED_FORMATS[:-1])} or "
            f"{ALIGNED_FORMATS[-1]}, not '{shape}'",
            param=name,
            code="invalid_value",
        )
    language = values.get("language")
    return replace(params, known_lines=lines, response_format=shape, language=language)


def _with_values(params: TranscriptionParams, values: Mapping[str, Any]) -> TranscriptionParams:
    if values.get("decoding") == "sequential":
        params = replace(params, gates=QualityGates())  # as openai/whisper: keep the last attempt
    listed = values.get("timestamp_granularities", ())
    hotwords = [values.get("hotwords", ""), *values.get("keywords", ())]
    own: dict[str, Any] = {
        "words": "word" in listed,
        "segments": "segment" in listed or "word" not in listed,
        "logprobs": "logprobs" in values.get("include", ()),
        "hotwords": ", ".join(word.strip() for word in hotwords if word.strip()) or None,
    }
    parts: dict[str, dict[str, Any]] = {"speakers": {"by": _speakers_by(values)}}
    for name, value in values.items():
        part, _, attribute = FIELDS[name].attribute.rpartition(".")
        if part:
            parts.setdefault(part, {})[attribute] = value
        elif attribute:
            own[attribute] = value
    own |= {part: replace(getattr(params, part), **changes) for part, changes in parts.items()}
    return replace(params, **own)


def _speakers_by(values: Mapping[str, Any]) -> Way | None:
    if values.get("channels") == "separate":
        return "channel"
    asked = values.get("diarize") or values.get("response_format") == "diarized_json"
    return "voice" if asked else None


# ---- spellings

Sent = dict[str, Any]  # by field: a text, a list of items, or an object's parts by name


def collect(pairs: Iterable[tuple[str, str]], fields: Mapping[str, RequestField]) -> Sent:
    """Group pairs by field. Raises InvalidRequestError if a name is unknown or repeated."""
    sent: Sent = {}
    for raw_name, text in pairs:
        name, bracket, key = raw_name.partition("[")
        key = key.removesuffix("]")
        shape = fields[name].kind.shape if name in fields else None
        if shape == "list" and (not key or key.isdigit()):
            sent.setdefault(name, []).extend(_items(text))
        elif shape == "object" and (key or not bracket):
            _add_to_object(sent.setdefault(name, {}), name, key, text)
        elif shape == "text" and not bracket:
            if name in sent:
                raise repeated(name)
            sent[name] = text
        else:
            raise _unknown(raw_name, fields)
    return sent


def _items(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
            json.dumps(items, ensure_ascii=False).encode()  # fails for lone surrogates
        except (ValueError, RecursionError):
            return [text]
        return list(items)
    return [text]


def _add_to_object(known: dict[str, str], name: str, key: str, text: str) -> None:
    """Add `name[key]=text`, or a whole object as JSON or as its type alone."""
    parts: Mapping[str, Any]
    if key:
        parts = {key: text}
    elif text.lstrip().startswith("{"):
        try:
            parts = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"'{name}' is not a JSON object", param=name) from None
    else:
        parts = {"type": text}
    if known.keys() & parts.keys():
        raise repeated(name)
    known.update((key, str(part)) for key, part in parts.items())


def _unknown(raw_name: str, fields: Mapping[str, RequestField]) -> InvalidRequestError:
    offered = ", ".join(field.spelling for field in fields.values())
    return InvalidRequestError(
        f"unknown field {shown(raw_name)}; this endpoint takes: {offered}",
        param=raw_name[:SHOWN],
        code="unknown_parameter",
    )


# ---- how fields go together

Conflicts = Iterator[tuple[str, str]]  # the field to change, and why


def check_model(params: TranscriptionParams, languages: Collection[str]) -> None:
    """Raises UnsupportedValueError if a model with these languages cannot do what is asked."""
    if params.task == "translate" and len(languages) == 1:
        raise UnsupportedValueError(
            f"model {shown(params.model)} supports English only and cannot translate; "
            f"ask for a transcription",
            param="model",
        )
    for name, asked in (("language", (params.language,)), ("languages", params.languages)):
        if unknown := [code for code in asked if code is not None and code not in languages]:
            raise UnsupportedValueError(
                f"this model does not support the language {shown(unknown[0])}; "
                f"it knows: {', '.join(sorted(languages))}",
                param=name,
            )


def _decoding_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    if params.decoding == "parallel":
        for name in sent:
            if FIELDS[name].only_sequential:
                yield name, f"'{name}' needs decoding=sequential"
    elif params.chunking is not None:
        name = "chunking_strategy"
        yield name, f"'{name}' cuts at pauses, which decoding=sequential does not"
    if params.sequential.carry_initial_prompt and params.prompt is None:
        yield "carry_initial_prompt", "'carry_initial_prompt' needs a 'prompt'"


def _search_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    if "fallback" in sent and params.fallback and params.temperature > 0:
        yield "fallback", "'fallback' climbs from temperature 0; leave 'temperature' out"
    if params.beam_size > 1 and params.temperature > 0:
        yield "beam_size", "'beam_size' needs temperature 0; above it, use 'best_of'"
    if params.best_of > 1 and params.temperatures == (0.0,):
        yield "best_of", "'best_of' needs a temperature above 0, or 'fallback'"
    if "patience" in sent and params.beam_size == 1:
        yield "patience", "'patience' needs a 'beam_size' above 1"
    if params.length_penalty is not None and max(params.beam_size, params.best_of) == 1:
        yield "length_penalty", "'length_penalty' needs 'beam_size' or 'best_of' above 1"


def _answer_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    instead = f"not '{params.response_format}'"
    if params.language is not None and params.languages:
        yield "languages", "send either 'language' or 'languages', not both"
    if params.words and params.response_format != "verbose_json":
        name = "timestamp_granularities"
        yield name, f"timestamp granularity 'word' needs response_format 'verbose_json', {instead}"
    if params.logprobs and params.response_format != "json":
        yield "include", f"'logprobs' needs response_format 'json', {instead}"


NOT_BESIDE_SPEAKERS = ("prompt", "include", "timestamp_granularities")  # OpenAI's rule


def _speaker_conflicts(params: TranscriptionParams, sent: Mapping[str, Any]) -> Conflicts:
    asked, known = params.speakers, ("known_speaker_names", "known_speaker_references")
    if asked.by == "channel" and sent.get("diarize"):
        yield "diarize", "'diarize' is by voice, and channels=separate by channel; send one of them"
    for name in sent:
        by = "channel" if name == "channel_names" else "voice"
        if FIELDS[name].attribute.startswith("speakers.") and asked.by != by:
            need = "channels=separate" if by == "channel" else "diarize=true or diarized_json"
            beside = ", without channels=separate" if asked.by == "channel" else ""
            yield name, f"'{name}' needs {need}{beside}"
        if params.response_format == "diarized_json" and name in NOT_BESIDE_SPEAKERS:
            yield name, f"'{name}' does not go with response_format 'diarized_json'"
        if name == "include" and asked.by is not None:
            yield name, "'include' does not go with speakers: a text's lines are theirs"
    least, most = asked.min_speakers or 1, asked.num_speakers or asked.max_speakers
    if asked.num_speakers and (asked.min_speakers or asked.max_speakers):
        yield "num_speakers", "send either 'num_speakers', or 'min_speakers' and 'max_speakers'"
    if most is not None and least > most:
        yield "min_speakers", "'min_speakers' must not exceed 'max_speakers'"
    if asked.by == "voice" and len(asked.names) != len(asked.references):
        counts = f"{len(asked.names)} and {len(asked.references)}"
        yield known[1], f"'{known[0]}' and '{known[1]}' must come in pairs, not {counts}"
    if asked.by == "voice" and len(set(asked.names)) < len(asked.names):
        yield known[0], f"the names in '{known[0]}' must differ"
    if asked.by == "voice" and most is not None and len(asked.names) > most:
        yield known[0], f"'{known[0]}' has {len(asked.names)} names for {most} speakers"
