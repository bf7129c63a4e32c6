"""What /docs and /openapi.json say of the endpoints: the forms as `router.api.forms` checks them.

The form is read from the stream, not by the framework, so its description is written here; tests
hold it to the fields that are really taken, and send its examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from router.api.chunking import MAX_CHUNKING_MS
from router.api.fields import OFF
from router.api.forms import (
    EXTENSION_FIELDS,
    GRANULARITIES,
    MAX_CANDIDATES,
    MAX_CLIP_S,
    MAX_COMPRESSION_RATIO,
    MAX_PATIENCE,
    MAX_SEED,
    MAX_SILENCE_S,
    MAX_TOKENS,
    MIN_LOGPROB,
    MIN_PATIENCE,
    STREAM_USAGE_FIELDS,
    TRANSCRIPTION_FORM,
    TRANSLATION_FORM,
)
from router.api.params import DECODINGS, PARALLEL_GATES, RESPONSE_FORMATS, Chunking
from router.api.responses import ErrorResponse, TextDeltaEvent, TextDoneEvent

Schema = dict[str, Any]

TRANSCRIPTION_EXAMPLES: dict[str, dict[str, str]] = {
    "Text": {"model": "whisper-1"},
    "Segments and words with times": {
        "model": "whisper-1",
        "response_format": "verbose_json",
        "timestamp_granularities[]": "word",
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


def curl_line(path: str, form: Mapping[str, str]) -> str:
    """An example as a command; `-N` shows a stream as it comes."""
    fields = "".join(f" -F {name}={value}" for name, value in form.items())
    option = " -N" if form.get("stream") == "true" else ""
    return f"curl{option} http://localhost:8000{path}{fields} -F file=@speech.wav"


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
be honoured beside the others, is refused with a 400 that names it.
"""


def _number(low: float, high: float, text: str, default: float | None = None) -> Schema:
    schema: Schema = {"type": "number", "minimum": low, "maximum": high, "description": text}
    return schema if default is None else {**schema, "default": default}


def _integer(low: int, high: int, text: str, default: int | None = None) -> Schema:
    return {**_number(low, high, text, default), "type": "integer"}


def _boolean(text: str, default: bool) -> Schema:
    return {"type": "boolean", "default": default, "description": text}


def _string(text: str, *examples: str) -> Schema:
    schema: Schema = {"type": "string", "description": text}
    return {**schema, "examples": list(examples)} if examples else schema


def _choice(choices: tuple[str, ...], default: str, text: str) -> Schema:
    return {"type": "string", "enum": list(choices), "default": default, "description": text}


def _list(items: Schema, text: str) -> Schema:
    return {"type": "array", "items": items, "description": text}


def _threshold(low: float, high: float, text: str, default: float | None) -> Schema:
    """A number that the text `none` (or JSON's word for it) turns off."""
    number = {"type": "number", "minimum": low, "maximum": high}
    off = {"type": "string", "enum": list(OFF)}
    schema: Schema = {"oneOf": [number, off], "description": f"{text} `none` turns it off."}
    return schema if default is None else {**schema, "default": default}


_SEQUENTIAL = "Only with `decoding=sequential`. "
_VOICE = Chunking()

FIELDS: dict[str, Schema] = {
    "file": {
        "type": "string",
        "format": "binary",
        "description": "The audio: flac, mp3, mp4, mpeg, mpga, m4a, ogg, opus, wav or webm. "
        "What it is is seen from its content, not from its name.",
    },
    "model": _string("A name from `GET /v1/models`, or `whisper-1`.", "whisper-1"),
    "language": _string("ISO-639-1 code or English name. Left out, it is detected.", "en"),
    "prompt": _string("Text that came before the audio: sets style and spelling."),
    "response_format": _choice(
        RESPONSE_FORMATS,
        "json",
        "`json` and `text` give the text, `verbose_json` segments or words with times too, `srt` "
        "and `vtt` subtitles.",
    ),
    "temperature": _number(
        0, 1, "0 decodes greedily, or with beams; above it, tokens are sampled.", 0
    ),
    "stream": _boolean(
        "Answer with server-sent events while the rest is still being transcribed. With `srt` and "
        "`vtt` each delta is whole cues; with `verbose_json` the last event has the whole answer.",
        False,
    ),
    "stream_include_usage": _boolean(
        "As vLLM's clients read a stream: each delta has `choices` besides, and the last event's "
        "`usage` has `prompt_tokens` and `completion_tokens`.",
        False,
    ),
    "stream_continuous_usage_stats": _boolean(
        "With `stream_include_usage`: each delta has `usage` too, of the segments closed by then.",
        False,
    ),
    "timestamp_granularities[]": _list(
        {"type": "string", "enum": list(GRANULARITIES)},
        "What `verbose_json` lists: `segment` (the default), `word`, or both.",
    ),
    "include[]": _list(
        {"type": "string", "enum": ["logprobs"]},
        "`logprobs`: each token's log probability. Only with `json`.",
    ),
    "keywords[]": _list({"type": "string"}, "Words to expect; added to `hotwords`."),
    "chunking_strategy": {
        "oneOf": [
            {"type": "string", "enum": ["auto"]},
            {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"type": "string", "enum": ["server_vad"]},
                    "threshold": _number(
                        0, 1, "From which probability on it is speech.", _VOICE.threshold
                    ),
                    "prefix_padding_ms": _integer(
                        0, MAX_CHUNKING_MS, "Kept before speech.", _VOICE.prefix_padding_ms
                    ),
                    "silence_duration_ms": _integer(
                        0, MAX_CHUNKING_MS, "A pause that ends it.", _VOICE.silence_duration_ms
                    ),
                },
                "additionalProperties": False,
            },
        ],
        "default": "auto",
        "description": "How the audio is cut into windows; not with `decoding=sequential`.",
    },
    "hotwords": _string("Words to expect, such as names; put before the prompt of every window."),
    "seed": _integer(
        0,
        MAX_SEED,
        "Of the sampling: the same seed gives the same text. Left out, it is drawn at random.",
    ),
    "decoding": _choice(
        DECODINGS,
        "parallel",
        "`parallel`: windows cut at pauses, decoded side by side. `sequential`: openai/whisper's "
        "own way, each window from where the last one's text ended.",
    ),
    "fallback": _boolean(
        "Decode a window again at higher temperatures where its text fails the thresholds below; "
        "only from temperature 0 on.",
        True,
    ),
    "beam_size": _integer(1, MAX_CANDIDATES, "Beams at temperature 0.", 1),
    "patience": _number(MIN_PATIENCE, MAX_PATIENCE, "Of the beam search.", 1),
    "best_of": _integer(1, MAX_CANDIDATES, "Samples above temperature 0.", 1),
    "length_penalty": _number(
        0, 1, "Ranks beams and samples by Google's formula; left out: by their mean."
    ),
    "max_completion_tokens": _integer(
        1,
        MAX_TOKENS,
        "Tokens of each window, timestamps included; what it has no room for is not transcribed.",
    ),
    "compression_ratio_threshold": _threshold(
        0,
        MAX_COMPRESSION_RATIO,
        "Text that compresses better repeats itself and has failed.",
        PARALLEL_GATES.compression_ratio,
    ),
    "logprob_threshold": _threshold(
        MIN_LOGPROB, 0, "A lower mean has failed.", PARALLEL_GATES.avg_logprob
    ),
    "no_speech_threshold": _threshold(
        0,
        1,
        "A window above it is silence, if its text has failed `logprob_threshold` too.",
        PARALLEL_GATES.no_speech_prob,
    ),
    "condition_on_previous_text": _boolean(
        _SEQUENTIAL + "Show each window the text before it.", True
    ),
    "carry_initial_prompt": _boolean(_SEQUENTIAL + "Put `prompt` before every window.", False),
    "hallucination_silence_threshold": _threshold(
        0, MAX_SILENCE_S, _SEQUENTIAL + "Skip silence of so many seconds around odd words.", None
    ),
    "clip_timestamps[]": _list(
        {"type": "number", "minimum": 0, "maximum": MAX_CLIP_S},
        _SEQUENTIAL + "start, end, start, end, ... in seconds: the parts to transcribe. One text "
        "with commas will do.",
    ),
}


def _body(title: str, spellings: tuple[str, ...], example: Mapping[str, str]) -> Schema:
    properties = {}
    for name in spellings:
        schema = FIELDS[name]
        if name in (*EXTENSION_FIELDS, *STREAM_USAGE_FIELDS, "clip_timestamps[]"):
            schema = {**schema, "description": f"{schema['description']} (Not in OpenAI's API.)"}
        properties[name] = schema
    form = {
        "title": title,
        "type": "object",
        "required": ["file", "model"],
        "properties": properties,
        "additionalProperties": False,
    }
    content = {"multipart/form-data": {"schema": form, "example": dict(example)}}
    return {"requestBody": {"required": True, "content": content}}


TRANSCRIPTION_BODY = _body(
    "TranscriptionRequest", TRANSCRIPTION_FORM.spellings, TRANSCRIPTION_EXAMPLES["Text"]
)
TRANSLATION_BODY = _body(
    "TranslationRequest", TRANSLATION_FORM.spellings, TRANSLATION_EXAMPLES["English text"]
)


def _event(event: type[BaseModel]) -> Schema:
    """Its schema with all that it refers to in place: not everything is an answer's as well."""
    schema = event.model_json_schema()
    parts = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if name := node.get("$ref"):
                return inline(parts[name.rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    found: Schema = inline(schema)
    return found


_TEXTS: Schema = {
    "text/plain": {"schema": {"type": "string"}, "example": "What was said.\n"},
    "text/vtt": {
        "schema": {"type": "string"},
        "example": "WEBVTT\n\n00:00.000 --> 00:01.500\nWhat was said.\n\n",
    },
}
_EVENT = {
    "oneOf": [_event(TextDeltaEvent), _event(TextDoneEvent), _event(ErrorResponse)],
}
_EVENTS: Schema = {
    "schema": {  # of one event, as OpenAPI 3.2 describes a stream's items
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "anyOf": [
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": _EVENT,
                    },
                    {"type": "string", "const": "[DONE]"},
                ],
            }
        },
        "description": "Each event has `data`; the last is `[DONE]`. A failure in the middle is an "
        "event with an `error`, then the end. Lines with `:` are no events.",
    },
    "example": 'data: {"type":"transcript.text.delta","delta":"What was said."}\n\n'
    'data: {"type":"transcript.text.done","text":"What was said.",'
    '"usage":{"type":"tokens","input_tokens":75,"output_tokens":7,"total_tokens":82,'
    '"input_token_details":{"text_tokens":0,"audio_tokens":75},"seconds":2}}\n\n'
    "data: [DONE]\n\n",
}
_TIMING = "Header `server-timing` says where the time went, in ms."

TRANSCRIPTION_OK: Schema = {
    "description": f"The transcript. {_TIMING}",
    "content": {**_TEXTS, "text/event-stream": _EVENTS},
}
TRANSLATION_OK: Schema = {"description": f"The translation. {_TIMING}", "content": _TEXTS}

ERRORS: dict[int | str, Schema] = {
    "4XX": {
        "model": ErrorResponse,
        "description": "The request cannot be served as it is; 429: the key has as many requests "
        "running as it may (try again after `retry-after` seconds).",
    },
    "5XX": {"model": ErrorResponse, "description": "Overloaded (try again later), or failed."},
}
