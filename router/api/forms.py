"""A form's fields, checked one by one and against each other, become `TranscriptionParams`.

Takes (name, text) pairs in any order. A field that this server does not know, does not offer, or
could not honour beside the others is refused by name. Fields and their kinds of values stand in
`router.api.request_fields`. Knows nothing of multipart parsing or of HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.messages import QualityGates, Task
from router.api.documents import repeated
from router.api.params import TranscriptionParams
from router.api.request_fields import FIELDS, NOT_OFFERED, fields_of
from router.api.rules import check_fields, check_model
from router.api.spellings import collect

Pairs = Iterable[tuple[str, str]]


def requested_model(pairs: Pairs) -> str:
    """The model that a form names, before anything else of it is checked.

    Raises:
        InvalidRequestError: it names none, or several.
    """
    names = [text.strip() for name, text in pairs if name == "model"]
    if len(names) > 1:
        raise repeated("model")
    if not names or not names[0]:
        raise InvalidRequestError("you must provide a 'model' parameter", param="model")
    return names[0]


def parse_transcription(pairs: Pairs, languages: Collection[str]) -> TranscriptionParams:
    """Check a form of /v1/audio/transcriptions.

    Args:
        pairs: names and texts of all parts but the file.
        languages: codes that the model knows.

    Raises:
        UnsupportedValueError: a field or value of OpenAI's that is not offered here, or what the
            model does not know.
        InvalidRequestError: an unknown or repeated field, a value that is no such thing, or one
            that does not go with the others.
    """
    return _parse("transcribe", tuple(pairs), languages, NOT_OFFERED)


def parse_translation(pairs: Pairs, languages: Collection[str]) -> TranscriptionParams:
    """Check a form of /v1/audio/translations; see `parse_transcription`.

    `language`, the one that is spoken, is an extension of ours; OpenAI detects it always.
    """
    return _parse("translate", tuple(pairs), languages, ())


def _parse(
    task: Task,
    pairs: tuple[tuple[str, str], ...],
    languages: Collection[str],
    refused: Collection[str],
) -> TranscriptionParams:
    model = requested_model(pairs)
    sent = collect(pairs, fields_of(task), refused)
    values = {
        name: FIELDS[name].kind.parse(name, content)
        for name, content in sent.items()
        if not (FIELDS[name].may_be_empty and isinstance(content, str) and not content.strip())
    }
    params = _with_values(TranscriptionParams(model, task=task), values)
    check_model(params, languages)
    check_fields(params, values)
    return params


def _with_values(params: TranscriptionParams, values: Mapping[str, Any]) -> TranscriptionParams:
    """`params` with every value where its field says."""
    if values.get("decoding") == "sequential":
        params = replace(params, gates=QualityGates())  # the last attempt stands, as there
    own = _of_several_fields(values)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, _, attribute = FIELDS[name].attribute.rpartition(".")
        if part:
            parts.setdefault(part, {})[attribute] = value
        elif attribute:
            own[attribute] = value
    own |= {part: replace(getattr(params, part), **changes) for part, changes in parts.items()}
    return replace(params, **own)


def _of_several_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that are not one field's value: words, segments, log probabilities, hotwords."""
    listed = values.get("timestamp_granularities", ())
    hotwords = [values.get("hotwords", ""), *values.get("keywords", ())]
    return {
        "words": "word" in listed,
        "segments": "segment" in listed or "word" not in listed,
        "logprobs": "logprobs" in values.get("include", ()),
        "hotwords": ", ".join(word.strip() for word in hotwords if word.strip()) or None,
    }
