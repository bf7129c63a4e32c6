"""A JSON body with base64 audio, parsed as its bytes are pushed in: the audio goes to the spool.

The text of `input_audio.data` is decoded piece by piece and never stands in memory as a whole; the
rest of the document, which is small, is kept and read when it has ended. Enforces every limit at
the byte that crosses it, as `router.http.multipart` does for forms, whose `FormReader` has the
same face. Does no input or output of its own. The document's shape is that of OpenRouter's
transcription endpoint, which Open WebUI sends too.
"""

from __future__ import annotations

import binascii
import json
import re
from typing import Any, NoReturn

from cluster.errors import AudioTooShortError, InvalidRequestError
from router.api.json_fields import AUDIO_FIELD, DATA_PART, check_audio, pairs_of
from router.audio.limits import too_large
from router.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, MAX_FRAMING_BYTES, FileSink

JSON_TYPE = b"application/json"
GROWTH = 1.5  # bytes of a body per byte of audio at most: base64, with some characters escaped
MAX_DEPTH = 16
MAX_DATA_URL_BYTES = 256  # of what stands before the base64

_AUDIO_PATH = [AUDIO_FIELD.encode(), DATA_PART.encode()]
_STRUCTURAL = re.compile(rb'[{}\[\],:"]')
_STRING_END = re.compile(rb'["\\]')
_DATA = f"{AUDIO_FIELD}.{DATA_PART}"  # as error messages name it


class JsonReader:
    """Sorts a document's bytes: the audio's to the sink, all others into a document without it."""

    def __init__(self, sink: FileSink, max_upload_bytes: int) -> None:
        self.filename = ""
        self._sink = sink
        self._max_upload_bytes = max_upload_bytes
        self._read_bytes = 0
        self._audio_bytes = 0  # of the body, not of the audio
        self._rest = bytearray()  # the document with an empty text for the audio
        self._step = self._structure
        self._keys: list[bytes | None] = []  # the current key of each open object; None: an array
        self._in_key = False
        self._string = bytearray()
        self._escaped = False
        self._base64: Base64Decoder | None = None

    def feed(self, chunk: bytes) -> None:
        self._read_bytes += len(chunk)
        at = 0
        while at < len(chunk):
            at = self._step(chunk, at)
        if self._read_bytes - self._audio_bytes > MAX_FRAMING_BYTES:
            raise too_large(self._max_upload_bytes, self._read_bytes)

    def finish(self) -> tuple[tuple[str, str], ...]:
        """Check that the document is whole. Returns its fields, as a form would have them."""
        try:
            document = json.loads(
                self._rest, object_pairs_hook=_unique, parse_constant=_no_such_number
            )
            json.dumps(document, ensure_ascii=False).encode()  # JSON can spell half a character
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is no JSON document: {error}") from None
        if not isinstance(document, dict):
            raise InvalidRequestError("the body must be a JSON object")
        check_audio(document, has_data=self._base64 is not None)
        if self._sink.size_bytes == 0:
            raise AudioTooShortError("the audio is empty", param=_DATA)
        fields = pairs_of(document)
        if len(fields) > MAX_FIELDS:
            raise InvalidRequestError(f"the document has more than {MAX_FIELDS} fields")
        for name, text in fields:
            if len(text.encode()) > MAX_FIELD_BYTES:
                raise InvalidRequestError(
                    f"field {name[:64]!r} is longer than {MAX_FIELD_BYTES} bytes", param=name[:64]
                )
        return fields

    # Each step takes bytes from `at` on and returns where the next one goes on.

    def _structure(self, chunk: bytes, at: int) -> int:
        """Up to the next bracket, comma, colon or text."""
        found = _STRUCTURAL.search(chunk, at)
        end = found.end() if found else len(chunk)
        self._rest += chunk[at:end]
        if found:
            self._enter(found.group())
        return end

    def _enter(self, mark: bytes) -> None:
        match mark:
            case b"{" | b"[":
                if len(self._keys) >= MAX_DEPTH:
                    raise InvalidRequestError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
                self._keys.append(b"" if mark == b"{" else None)
                self._in_key = mark == b"{"
            case b"}" | b"]":
                self._keys = self._keys[:-1]
                self._in_key = False
            case b",":
                self._in_key = bool(self._keys) and self._keys[-1] is not None
            case b":":
                self._in_key = False
            case _:
                self._begin_string()

    def _begin_string(self) -> None:
        if self._in_key or self._keys != _AUDIO_PATH:
            self._string.clear()
            self._step = self._text
            return
        if self._base64 is not None:
            raise InvalidRequestError(f"'{_DATA}' was sent more than once", param=_DATA)
        self._base64 = Base64Decoder()
        self._step = self._audio

    def _text(self, chunk: bytes, at: int) -> int:
        """Up to the end of a text that is not the audio."""
        if self._escaped:
            self._escaped = False
            end = at + 1
        else:
            found = _STRING_END.search(chunk, at)
            end = found.end() if found else len(chunk)
            if found and found.group() == b"\\":
                self._escaped = True
            elif found:
                self._end_string(chunk[at : end - 1])
        self._rest += chunk[at:end]
        if self._in_key and self._step == self._text:
            self._string += chunk[at:end]
        return end

    def _end_string(self, last: bytes) -> None:
        if self._in_key:
            self._keys[-1] = bytes(self._string) + last
        self._step = self._structure

    def _audio(self, chunk: bytes, at: int) -> int:
        """Up to the end of the audio's text. Base64 holds no quote, not even an escaped one."""
        assert self._base64 is not None
        quote = chunk.find(b'"', at)
        end = len(chunk) if quote < 0 else quote
        self._audio_bytes += end - at
        self._sink.append(self._base64.feed(chunk[at:end]))
        if quote >= 0:
            self._sink.append(self._base64.finish())
            self._rest += b'"'
            self._step = self._structure
            end += 1
        if self._sink.size_bytes > self._max_upload_bytes:
            raise too_large(self._max_upload_bytes, self._read_bytes)
        return end


class Base64Decoder:
    """Base64 as it stands in a JSON text, decoded as it comes.

    Line breaks are left out, and so is what a data URL has before the base64.
    """

    def __init__(self) -> None:
        self._escape = b""  # the begin of an escape that the last piece cut
        self._head: bytes | None = b""  # the text's first bytes; None: they were looked at
        self._rest = b""  # characters that are no whole group of four yet
        self._padded = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes that `piece` completes. Raises InvalidRequestError."""
        text = self._unescaped(self._escape + piece)
        if self._head is not None:
            text = self._without_head(self._head + text)
        text = self._rest + text.translate(None, b" \t\r\n")
        n_whole = len(text) // 4 * 4
        whole, self._rest = text[:n_whole], text[n_whole:]
        if not whole:
            return b""
        if self._padded:
            raise _not_base64("something follows its padding")
        self._padded = whole.endswith(b"=")
        try:
            return binascii.a2b_base64(whole, strict_mode=True)
        except binascii.Error as error:
            raise _not_base64(str(error)) from None

    def finish(self) -> bytes:
        """What is left when the text has ended. Raises InvalidRequestError."""
        if self._escape:
            raise _not_base64("it ends within an escape")
        head, self._head = self._head, None
        content = self.feed(head) if head else b""
        if self._rest:
            raise _not_base64("its length is no multiple of four: the end is missing")
        return content

    def _unescaped(self, text: bytes) -> bytes:
        """Some JSON writers escape the slash, and some the plus sign."""
        at = text.rfind(b"\\")
        is_cut = at >= 0 and len(text) - at < (6 if text[at + 1 : at + 2] in (b"u", b"") else 2)
        self._escape = text[at:] if is_cut else b""
        text = text[:at] if is_cut else text
        if b"\\" in text:
            text = text.replace(b"\\/", b"/")
            text = re.sub(rb"\\u00([0-7][0-9A-Fa-f])", _character, text)
            text = re.sub(rb"\\[nrt]", b"", text)
        return text

    def _without_head(self, text: bytes) -> bytes:
        if len(text) < 5 and b"data:".startswith(text[:5]):
            self._head = text
            return b""
        if not text.startswith(b"data:"):
            self._head = None
            return text
        kind, comma, content = text.partition(b",")
        if len(kind) > MAX_DATA_URL_BYTES or (comma and not kind.endswith(b";base64")):
            raise _not_base64("it begins like a data URL, and not like one with base64")
        self._head = None if comma else text
        return content


def _character(found: re.Match[bytes]) -> bytes:
    return bytes((int(found.group(1), 16),))


def _not_base64(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{_DATA}' is not base64: {why}", param=_DATA)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequestError(
                f"{name[:64]!r} was sent more than once; send it once", param=name[:64]
            )
        found[name] = value
    return found


def _no_such_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
