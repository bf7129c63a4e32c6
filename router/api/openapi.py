"""Describe the audio endpoints for /docs and /openapi.json.

FastAPI does not know the forms, which are parsed from the stream, so their schemas are written here
from `router.api.request_fields`. Tests send the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from pydantic import BaseModel

from router.api.documents import AUDIO_FIELD, AUDIO_SCHEMA
from router.api.kinds import RequestField, Schema
from router.api.params import Operation
from router.api.request_fields import fields_of
from router.api.responses import ErrorResponse

TRANSCRIPTION_EXAMPLES: dict[str, dict[str, str]] = {
    "Text": {"model": "whisper-1"},
    "Segments and words with times": {
        "model": "whisper-1",
        "response_format": "verbose_json",
        "timestamp_granularities[]": "word",
    },
    "A recording with a speaker on each channel": {
        "model": "whisper-1",
        "response_format": "diarized_json",
        "channels": "separate",
    },
    "Subtitles": {"model": "whisper-1", "response_format": "srt"},
    "As it becomes certain": {"model": "whisper-1", "stream": "true"},
    "As openai/whisper does it, with beams": {
        "model": "whisper-1",
        "decoding": "sequential",
        "beam_size": "5",
    },
}
TRANSLATION_EXAMPLES: dict[str, dict[str, str]] = {"English text": {"model": "whisper-1"}}
ALIGNMENT_EXAMPLES: dict[str, dict[str, str]] = {
    "Words with times": {"model": "whisper-1", "text": "What is said."}
}


def curl_line(path: str, form: Mapping[str, str]) -> str:
    fields = "".join(f" -F {quote(f'{name}={value}')}" for name, value in form.items())
    option = " -N" if form.get("stream") == "true" else ""
    file = "call.wav" if "channels" in form else "speech.wav"
    return f"curl{option} http://localhost:8000{path}{fields} -F file=@{file}"


def _examples(path: str, examples: Mapping[str, Mapping[str, str]]) -> str:
    return "\n".join(f"# {title}\n{curl_line(path, form)}" for title, form in examples.items())


DESCRIPTION = f"""
Speech to text with Whisper models, through OpenAI's API: point an OpenAI client at this server.

```
{_examples("/v1/audio/transcriptions", TRANSCRIPTION_EXAMPLES)}
# A translation into English
{curl_line("/v1/audio/translations", TRANSLATION_EXAMPLES["English text"])}
```

Where the server has API keys, add `-H "Authorization: Bearer KEY"`. Fields that are not OpenAI's
go into `extra_body` of its SDKs. A field or value that is not described here, or that could not
be honoured beside the others, is refused with a 400 that names it. In place of a form a body may
be JSON with the audio in base64:
`{{"model": "whisper-1", "input_audio": {{"data": "UklGR...", "format": "wav"}}}}`.
"""


def _property(field: RequestField) -> Schema:
    ours = "" if field.origin == "OpenAI" else " (Not in OpenAI's API.)"
    schema = {**field.kind.schema(), "description": field.description + ours}
    if field.default not in (None, ()):
        schema["default"] = field.default
    return schema


def _body(title: str, task: Operation, example: Mapping[str, str]) -> Schema:
    form = {
        "title": title,
        "type": "object",
        "required": ["file", "model"],
        "properties": {field.spelling: _property(field) for field in fields_of(task).values()},
        "additionalProperties": False,
    }
    document = {
        **form,
        "title": f"{title}Document",
        "required": [AUDIO_FIELD, "model"],
        "properties": {
            AUDIO_FIELD: AUDIO_SCHEMA,
            **{
                field.name: _property(field)
                for field in fields_of(task).values()
                if field.kind.shape != "file"
            },
        },
    }
    content = {
        "multipart/form-data": {"schema": form, "example": dict(example)},
        "application/json": {"schema": document},
    }
    return {"requestBody": {"required": True, "content": content}}


TRANSCRIPTION_BODY = _body("TranscriptionRequest", "transcribe", TRANSCRIPTION_EXAMPLES["Text"])
TRANSLATION_BODY = _body("TranslationRequest", "translate", TRANSLATION_EXAMPLES["English text"])

ALIGNMENT_BODY = _body("AlignmentRequest", "align", ALIGNMENT_EXAMPLES["Words with times"])


def whole_schema(model: type[BaseModel]) -> Schema:
    """JSON schema with its definitions inlined: FastAPI lists only those of its own models."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if name := node.get("$ref"):
                return inline(parts[name.rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    found: Schema = inline(schema)
    return found


def resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, merged with the one in `schemas` that its `$ref` names."""
    if "$ref" not in schema:
        return schema
    return {**schemas[schema["$ref"].rpartition("/")[2]], **schema}


def values_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Describe the values of a JSON schema in Markdown. `schemas` are the targets of its `$ref`."""
    schema = resolved(schema, schemas)
    match schema:
        case {"oneOf": kinds} | {"anyOf": kinds}:
            return " or ".join(dict.fromkeys(values_of(one, schemas) for one in kinds))
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"items": items}:
            return f"list of: {values_of(items, schemas)}"
        case {"properties": parts} if "$ref" not in schema:
            told = (_part(name, part, schemas) for name, part in parts.items())
            return f"object of {'; '.join(told)}"
        case {"type": "boolean"}:
            return "`true`, `false`"
        case {"format": "binary"}:
            return "file"
    kind = str(schema.get("type", "any value"))
    kind = {"string": "text", "integer": "whole number"}.get(kind, kind)
    bounds = (schema.get("minimum"), schema.get("maximum"))
    low, high = (f"{one:g}" if isinstance(one, float) else one for one in bounds)
    if low is not None and high is not None:
        return f"{kind} from {low} to {high}"
    return kind if low is None else f"{kind}, at least {low}"


def _part(name: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    about = f": {schema['description']}" if "description" in schema else ""
    return f"`{name}` ({values_of(schema, schemas)}){about.removesuffix('.')}"


_TEXTS: Schema = {
    "text/plain": {"schema": {"type": "string"}, "example": "What was said.\n"},
    "text/vtt": {
        "schema": {"type": "string"},
        "example": "WEBVTT\n\n00:00.000 --> 00:01.500\nWhat was said.\n\n",
    },
}
_EVENTS: Schema = {
    "schema": {},  # tools disagree whether an event is a string or an object
    "example": 'data: {"type":"transcript.text.delta","delta":"What was said."}\n\n'
    'data: {"type":"transcript.text.done","text":"What was said.",'
    '"usage":{"type":"tokens","input_tokens":75,"output_tokens":7,"total_tokens":82,'
    '"input_token_details":{"text_tokens":0,"audio_tokens":75},"seconds":2}}\n\n'
    "data: [DONE]\n\n",
}
_TIMING = (
    "Header `server-timing` says where the time went, in ms, and `x-splitscribe-cache` whether the "
    "same audio had been encoded before."
)

_STREAM = (
    "With `stream=true` it comes as OpenAI's events: `transcript.text.delta`, whose texts joined "
    "are the whole (with `diarized_json` `transcript.text.segment`), then `transcript.text.done`, "
    "which has the answer's other fields, then `[DONE]`. With `verbose_json` a delta also has the "
    "`segments` that closed, and the last event as `server_timing` what the header cannot say at a "
    "stream's beginning. A failure in the middle is an event with an `error`, then the end. Lines "
    "with `:` are no events."
)

_STREAMED: Schema = {**_TEXTS, "text/event-stream": _EVENTS}
TRANSCRIPTION_OK: Schema = {
    "description": f"The transcript. {_TIMING} {_STREAM}",
    "content": _STREAMED,
}
TRANSLATION_OK: Schema = {
    "description": f"The translation. {_TIMING} {_STREAM}",
    "content": _STREAMED,
}
ALIGNMENT_OK: Schema = {"description": f"The text with its times. {_TIMING}", "content": _TEXTS}

ERRORS: dict[int | str, Schema] = {
    "4XX": {
        "model": ErrorResponse,
        "description": "The request cannot be served as it is; 429: the key has as many requests "
        "running as it may (try again after `retry-after` seconds).",
    },
    "5XX": {"model": ErrorResponse, "description": "Overloaded (try again later), or failed."},
}
