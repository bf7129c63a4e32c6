"""What /docs and /openapi.json say of the endpoints: the form as `router.schemas` checks it.

The form is read from the stream, not by the framework, so its description is written here; a
test holds it to the fields that are really taken.
"""

from __future__ import annotations

from typing import Any

from router.schemas import MAX_SEED, RESPONSE_FORMATS, ErrorResponse

DESCRIPTION = """
Speech to text with Whisper models, through OpenAI's API: point an OpenAI client at this server.

```
curl http://localhost:8000/v1/audio/transcriptions -F model=whisper-1 -F file=@speech.wav
```

A field or value that is not described here is refused with a 400 that names it.
"""

FORM_PROPERTIES: dict[str, dict[str, Any]] = {
    "file": {
        "type": "string",
        "format": "binary",
        "description": "The audio: flac, mp3, mp4, mpeg, mpga, m4a, ogg, opus, wav or webm. "
        "What it is is seen from its content, not from its name.",
    },
    "model": {
        "type": "string",
        "description": "A name from `GET /v1/models`, or `whisper-1`.",
        "examples": ["whisper-1"],
    },
    "language": {
        "type": "string",
        "description": "ISO-639-1 code or English name. Left out, it is detected.",
        "examples": ["en"],
    },
    "prompt": {
        "type": "string",
        "description": "Text that came before the audio: sets style and spelling.",
    },
    "response_format": {
        "type": "string",
        "enum": list(RESPONSE_FORMATS),
        "default": "json",
        "description": "`json` and `text` give the text, `verbose_json` segments with times too.",
    },
    "temperature": {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "default": 0,
        "description": "0 decodes greedily; above it, tokens are sampled.",
    },
    "seed": {
        "type": "integer",
        "minimum": 0,
        "maximum": MAX_SEED,
        "description": "Of the sampling: the same seed gives the same text. (Not in OpenAI's "
        "API; send it in `extra_body`.) Left out, it is drawn at random.",
    },
    "timestamp_granularities[]": {
        "type": "array",
        "items": {"type": "string", "enum": ["segment"]},
        "description": "`verbose_json` always has segments.",
    },
    "stream": {
        "type": "boolean",
        "enum": [False],
        "default": False,
        "description": "Only `false`: the answer comes when it is whole.",
    },
}

TRANSCRIPTION_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "title": "TranscriptionRequest",
                    "type": "object",
                    "required": ["file", "model"],
                    "properties": FORM_PROPERTIES,
                    "additionalProperties": False,
                }
            }
        },
    }
}

TRANSCRIPTION_OK: dict[str, Any] = {
    "description": "The transcript. Header `server-timing` says where the time went, in ms.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorResponse, "description": "Overloaded (try again later), or failed."},
}
