"""A JSON body with base64 audio: its fields as a form has them, and the audio's bytes.

The document's shape is that of OpenRouter's transcription endpoint, which Open WebUI sends too.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator

from cluster.common.errors import AudioTooShortError, InvalidRequestError, PayloadTooLargeError
from router.api.documents import AUDIO_FIELD, DATA_PART, check_audio, pairs_of, read_json, repeated
from router.audio.protocol import too_large
from router.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, MAX_FRAMING_BYTES

JSON_TYPE = b"application/json"
GROWTH = 1.5  # bytes of a body per byte of audio at most: base64, with some characters escaped
PIECE = 1 << 20  # characters that are decoded at once
MAX_DATA_URL_BYTES = 256  # of what stands before the base64

_DATA = f"{AUDIO_FIELD}.{DATA_PART}"  # as error messages name it


def read_document(content: bytes, max_upload_bytes: int) -> tuple[tuple[tuple[str, str], ...], str]:
    """The fields of a body, and the text that holds its audio. Raises SplitscribeError."""
    try:
        document = read_json(content, (AUDIO_FIELD, DATA_PART), MAX_FRAMING_BYTES)
        if isinstance(document, dict) and isinstance(audio := document.get(AUDIO_FIELD), dict):
            data, audio[DATA_PART] = audio.get(DATA_PART), ""
        else:
            data = None
        json.dumps(document, ensure_ascii=False).encode()  # JSON can spell half a character
    except PayloadTooLargeError:
        raise too_large(max_upload_bytes, len(content)) from None
    except InvalidRequestError as error:
        if error.param == DATA_PART:
            raise repeated(_DATA) from None
        raise
    except ValueError as error:
        raise InvalidRequestError(f"the body is no JSON document: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    check_audio(document, has_data=isinstance(data, str))
    if not data:
        raise AudioTooShortError("the audio is empty", param=_DATA)
    fields = pairs_of(document)
    if len(fields) > MAX_FIELDS:
        raise InvalidRequestError(f"the document has more than {MAX_FIELDS} fields")
    for name, text in fields:
        if len(text.encode()) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"field {name[:64]!r} is longer than {MAX_FIELD_BYTES} bytes", param=name[:64]
            )
    return fields, data


def decoded(text: str) -> Iterator[bytes]:
    """The bytes of base64, piece by piece. Raises InvalidRequestError."""
    start = 0
    if text.startswith("data:"):
        start = text.find(",", 0, MAX_DATA_URL_BYTES) + 1
        if not text[:start].endswith(";base64,"):
            raise _not_base64("it begins like a data URL, and not like one with base64")
    try:
        letters = text[start:].encode("ascii").translate(None, b" \t\r\n")
        if len(letters) % 4:
            raise _not_base64("its length is no multiple of four: the end is missing")
        if b"=" in letters[:-2]:
            raise _not_base64("something follows its padding")
        for at in range(0, len(letters), PIECE):
            yield binascii.a2b_base64(letters[at : at + PIECE], strict_mode=True)
    except ValueError as error:
        raise _not_base64(str(error)) from None


def _not_base64(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{_DATA}' is not base64: {why}", param=_DATA)


class Budget:
    """What one connection may still do. May be overdrawn; what is spent then is owed in time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._at_s: float | None = None  # of the last spending

    def spend(self, amount: float, now_s: float) -> float:
        """Take `amount`. Returns the seconds until the budget has it: 0.0 where it had it."""
        earned = 0.0 if self._at_s is None else (now_s - self._at_s) * self._per_s
        self._left = min(self._left + earned, self._burst) - amount
        self._at_s = now_s
        return max(0.0, -self._left / self._per_s)
