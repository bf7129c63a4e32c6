"""The fields of a JSON body, as a form has them: (name, text) pairs for `router.api.forms`.

The audio is `input_audio`, an object of `data` (base64, which is read elsewhere) and `format`; all
other fields are those of the form, with JSON's own numbers, booleans and lists. Knows nothing of
HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.api.kinds import Schema, shown
from router.api.request_fields import FIELDS

AUDIO_FIELD = "input_audio"
DATA_PART = "data"
FORMAT_PART = "format"
HEADERLESS = ("pcm", "pcm16", "pcm24", "s16le", "raw", "l16")  # nothing in them says what they are

AUDIO_SCHEMA: Schema = {
    "type": "object",
    "description": "The audio, in place of a file.",
    "required": [DATA_PART],
    "properties": {
        DATA_PART: {"type": "string", "format": "byte", "description": "base64 of the file"},
        FORMAT_PART: {
            "type": "string",
            "description": "such as wav or mp3; what it is is seen from its content",
            "examples": ["wav"],
        },
    },
    "additionalProperties": False,
}


def check_audio(document: Mapping[str, Any], *, has_data: bool) -> None:
    """Check the shape of `input_audio`. has_data: its text was met, and decoded on the way.

    Raises:
        UnsupportedValueError: its format has no header.
        InvalidRequestError: it is missing, or not such an object.
    """
    audio = document.get(AUDIO_FIELD)
    if not isinstance(audio, dict) or not has_data or audio.get(DATA_PART) != "":
        raise InvalidRequestError(
            f"no audio was sent: send '{AUDIO_FIELD}' with '{DATA_PART}', the file's bytes in "
            f"base64, "
            f"and '{FORMAT_PART}'",
            param=AUDIO_FIELD,
        )
    if unknown := audio.keys() - {DATA_PART, FORMAT_PART}:
        name = f"{AUDIO_FIELD}.{min(unknown)}"[:64]
        raise InvalidRequestError(
            f"unknown field {name!r}; '{AUDIO_FIELD}' takes: {DATA_PART}, {FORMAT_PART}",
            param=name,
            code="unknown_parameter",
        )
    sort = audio.get(FORMAT_PART)
    if sort is not None and not isinstance(sort, str):
        name = f"{AUDIO_FIELD}.{FORMAT_PART}"
        raise InvalidRequestError(f"'{name}' must be a text, not {shown(sort)}", param=name)
    if sort is not None and sort.strip().lower() in HEADERLESS:
        raise UnsupportedValueError(
            f"audio of format {shown(sort)} has no header that says what it is; send wav",
            param=f"{AUDIO_FIELD}.{FORMAT_PART}",
        )


def pairs_of(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """All fields but the audio. Null is as if nothing had been sent.

    Raises:
        InvalidRequestError: a list or an object came where a text is expected.
    """
    return tuple(
        (name, _text(name, value))
        for name, value in document.items()
        if name != AUDIO_FIELD and value is not None
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    field = FIELDS.get(name.removesuffix("[]"))
    if isinstance(value, (list, dict)) and field is not None and field.kind.shape == "text":
        raise InvalidRequestError(
            f"'{name}' must be one value, not {shown(value)}", param=name, code="invalid_value"
        )
    return json.dumps(value, ensure_ascii=False)
