"""Parse clients' JSON after bounding its bytes, its depth and its number of values.

The parser needs twenty bytes of memory for each byte of `[],[],`, and holds the GIL meanwhile. So
only one long text, the base64 of audio, is allowed; it is cut out before the rest is parsed.
"""

from __future__ import annotations

import binascii
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.common.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedValueError
from router.api.kinds import Schema, shown
from router.api.request_fields import FIELDS

MAX_DEPTH = 16
MAX_VALUES = 10_000
PIECE = 1 << 20  # characters of base64 that are decoded at once
_MAX_QUOTES = 2 * MAX_VALUES
_BLANKS = b" \t\r\n"
# A string without a closing quote matches to the end: retrying at each quote would be quadratic.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(code for code in range(256) if chr(code) not in "[]{}")
_PLACE = secrets.token_hex(16)  # placeholder for the text that was cut out; clients cannot guess it

Body = TypeVar("Body", bound=BaseModel)


def read_json(content: bytes, max_bytes: int, *long_texts: Sequence[str]) -> Any:
    """Parse JSON of at most `max_bytes`, not counting a long text at one of the given key paths.

    Raises PayloadTooLargeError, InvalidRequestError for a repeated key, too much depth or too many
    values, or ValueError for anything that is not JSON.
    """
    if len(content) <= max_bytes:
        return _loaded(content)
    start, end = _longest(content)
    names = " or ".join(f"'{'.'.join(path)}'" for path in long_texts)
    too_long = f"more than {max_bytes} bytes are not {names}"
    if len(content) - (end - start) > max_bytes or any(
        content.find(bracket, start, end) >= 0 for bracket in (b"[", b"{")
    ):
        raise PayloadTooLargeError(too_long)  # its traceback must not keep the long texts alive
    document = _loaded(b"%b%b%b" % (content[:start], _PLACE.encode(), content[end:]))
    for *keys, last in long_texts:
        node = document
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(last) == _PLACE:
            text = str(memoryview(content)[start:end], "utf-8")
            node[last] = json.loads(f'"{text}"') if "\\" in text else text
            return document
    raise PayloadTooLargeError(too_long)


def _longest(content: bytes) -> tuple[int, int]:
    """Start and end of the longest piece between two quotes; (0, 0) if there are too many."""
    longest, start = (0, 0), 0
    for _ in range(_MAX_QUOTES):
        end = content.find(b'"', start)
        stop = len(content) if end < 0 else end
        if stop - start > longest[1] - longest[0]:
            longest = start, stop
        if end < 0:
            return longest
        start = end + 1
    return 0, 0


def base64_pieces(text: str, start: int = 0) -> Iterator[bytes]:
    """Decode base64, which may have line breaks, from `start` on. Yields pieces that are not empty,
    since decoding a file in one call would hold the GIL for 100 ms. Raises ValueError.
    """
    letters, is_padded = b"", False
    for at in range(start, len(text), PIECE):
        letters += text[at : at + PIECE].encode("ascii").translate(None, _BLANKS)
        if is_padded and letters:
            raise ValueError("characters follow its padding")
        n_whole = len(letters) & ~3
        if n_whole:
            is_padded = letters[n_whole - 1 : n_whole] == b"="
            yield binascii.a2b_base64(letters[:n_whole], strict_mode=True)
        letters = letters[n_whole:]
    if letters:
        raise ValueError("its length is not a multiple of four: the end is missing")


def parse_document(model: type[Body], content: bytes) -> Body:
    """Raises InvalidRequestError."""
    _check_shape(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> InvalidRequestError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")[:128]
    if first["type"] == "missing":
        return InvalidRequestError(
            f"you must provide '{where}'", param=where, code="missing_required_parameter"
        )
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
    return InvalidRequestError(
        f"'{where}': {first['msg']}" if where else first["msg"], param=where or None, code=code
    )


def repeated(name: str) -> InvalidRequestError:
    name = name[:64].encode(errors="backslashreplace").decode()  # JSON allows lone surrogates
    return InvalidRequestError(f"'{name}' was sent more than once; send it once", param=name)


def _loaded(content: bytes) -> Any:
    _check_shape(content)
    # `json.loads` would also accept bytes in UTF-16, where the search for quotes is wrong.
    text = content.decode("utf-8-sig")
    found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_such_number)
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # a lone surrogate cannot be stored, logged or sent
            half = ascii(error.object[error.start])
            raise ValueError(f"it has half of a surrogate pair, {half}: not valid text") from None
    return found


def _check_shape(content: bytes) -> None:
    bare = _STRINGS.sub(b"", content)
    brackets = bare.translate(None, _NO_BRACKETS)
    if bare.count(b",") + len(brackets) > MAX_VALUES:
        raise InvalidRequestError(f"the JSON holds more than {MAX_VALUES} values")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"the JSON is nested deeper than {MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise repeated(next(name for name in names if names.count(name) > 1))
    return found


def _no_such_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


AUDIO_FIELD = "input_audio"
DATA_PART = "data"
FORMAT_PART = "format"
MAX_URL = 8192  # characters of a URL that is not a data URL
HEADERLESS = ("pcm", "pcm16", "pcm24", "s16le", "raw", "l16")  # rate and channels are unknown

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


def audio_of(document: Mapping[str, Any]) -> str:
    """The base64 text in `input_audio`. Raises InvalidRequestError."""
    audio = document.get(AUDIO_FIELD)
    parts = f"'{DATA_PART}', the file's bytes in base64, and '{FORMAT_PART}'"
    if audio is not None and not isinstance(audio, dict):
        raise InvalidRequestError(
            f"'{AUDIO_FIELD}' must be an object of {parts}, not {shown(audio)}",
            param=AUDIO_FIELD,
            code="invalid_type",
        )
    if audio is None or not isinstance(audio.get(DATA_PART), str):
        raise InvalidRequestError(
            f"no audio was sent: send '{AUDIO_FIELD}' with {parts}", param=AUDIO_FIELD
        )
    if unknown := audio.keys() - {DATA_PART, FORMAT_PART}:
        name = f"{AUDIO_FIELD}.{min(unknown)}"[:64]
        raise InvalidRequestError(
            f"unknown field {name!r}; '{AUDIO_FIELD}' takes: {DATA_PART}, {FORMAT_PART}",
            param=name,
            code="unknown_parameter",
        )
    sort, name = audio.get(FORMAT_PART), f"{AUDIO_FIELD}.{FORMAT_PART}"
    if sort is not None and not isinstance(sort, str):
        raise InvalidRequestError(f"'{name}' must be a text, not {shown(sort)}", param=name)
    if sort is not None and sort.strip().lower() in HEADERLESS:
        raise UnsupportedValueError(
            f"audio of format {shown(sort)} has no header that says what it is; send wav",
            param=name,
        )
    return str(audio[DATA_PART])


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def decoded(text: str, name: str) -> Iterator[bytes]:
    """Decode base64 or a data URL with base64 piece by piece. Raises InvalidRequestError."""
    start = text.find(",", 0, MAX_URL) + 1 if is_data_url(text) else 0
    if is_data_url(text) and not text[:start].lower().endswith(";base64,"):
        raise InvalidRequestError(f"the data URL in '{name}' must be one with base64", param=name)
    try:
        yield from base64_pieces(text, start)
    except ValueError as error:
        raise InvalidRequestError(f"'{name}' is not base64: {error}", param=name) from None


def pairs_of(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """All fields except the audio; null means not sent. Raises InvalidRequestError."""
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
