"""Clients' JSON, bounded before it is parsed: its bytes, its depth, and how many values it holds.

A parser makes twenty bytes of objects of each byte of `[],[],`, and holds Python's lock meanwhile.
What is long in an honest document is one text, the base64 of audio: it is cut out, and all else is
short.
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
PIECE = 1 << 20  # letters of base64 that are decoded at once
_MAX_QUOTES = 2 * MAX_VALUES
_BLANKS = b" \t\r\n"
# To the end where the last quote is missing: a search from each quote in it would take for ever.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(code for code in range(256) if chr(code) not in "[]{}")
_PLACE = secrets.token_hex(16)  # stands for the text that was cut out; nobody can send it

Body = TypeVar("Body", bound=BaseModel)


def read_json(content: bytes, max_bytes: int, *long_texts: Sequence[str]) -> Any:
    """The document; if it is long, one text of it may be what is long.

    max_bytes: of all but that text. long_texts: the paths of keys to it; one of them has it.

    Raises:
        PayloadTooLargeError: something else is long.
        InvalidRequestError: a key came twice, it is nested too deeply, or holds too many values.
        ValueError: it is not JSON.
    """
    if len(content) <= max_bytes:
        return _loaded(content)
    start, end = _longest(content)
    names = " or ".join(f"'{'.'.join(path)}'" for path in long_texts)
    too_long = f"more than {max_bytes} bytes are not {names}"
    if len(content) - (end - start) > max_bytes or any(
        content.find(bracket, start, end) >= 0 for bracket in (b"[", b"{")
    ):
        raise PayloadTooLargeError(too_long)  # no name may hold it: it holds this frame's texts
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
    """Where the longest piece between two quotes begins and ends; empty: there are too many."""
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
    """What base64, which may be in lines, holds from `start` on: a piece at a time, since one call
    would keep Python's lock for 100 ms. None is empty. Raises ValueError.
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
    """Check a short document against its model. Raises InvalidRequestError."""
    _check_shape(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> InvalidRequestError:
    """pydantic's first complaint in OpenAI's terms."""
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
    name = name[:64].encode(errors="backslashreplace").decode()  # JSON spells half characters, too
    return InvalidRequestError(f"'{name}' was sent more than once; send it once", param=name)


def _loaded(content: bytes) -> Any:
    _check_shape(content)
    # Decoded here: it would be taken for UTF-16, too, in which quotes are not where they seem.
    text = content.decode("utf-8-sig")
    found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_such_number)
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # it can be neither stored, logged nor sent
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
MAX_URL = 8192  # characters of one that does not hold the audio itself
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


def audio_of(document: Mapping[str, Any]) -> str:
    """The text of the audio in `input_audio`. Raises InvalidRequestError."""
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
    """What base64, which may be in lines, or a data URL with base64 holds, a piece at a time.
    Raises InvalidRequestError, which calls it `name`.
    """
    start = text.find(",", 0, MAX_URL) + 1 if is_data_url(text) else 0
    if is_data_url(text) and not text[:start].lower().endswith(";base64,"):
        raise InvalidRequestError(f"the data URL in '{name}' must be one with base64", param=name)
    try:
        yield from base64_pieces(text, start)
    except ValueError as error:
        raise InvalidRequestError(f"'{name}' is not base64: {error}", param=name) from None


def pairs_of(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """All fields but the audio; null is as if nothing had been sent. Raises InvalidRequestError."""
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
