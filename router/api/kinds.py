"""The types of values that fields of forms, JSON bodies, batch lines and realtime sessions have.

`parse` of a kind checks a text or a JSON value that a client sent, and `schema` describes it as
JSON schema. `router.api.request_fields` declares the fields of a request with these kinds.
"""

from __future__ import annotations

import binascii
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal

from cluster.common.errors import InvalidRequestError
from cluster.common.model.text.languages import language_code
from router.api.params import Chunking, Operation, TranscriptionParams

Schema = dict[str, Any]
Shape = Literal["text", "list", "object", "file"]

SHOWN = 64  # characters of a client's value that an error message repeats
MAX_NAME = 64  # characters of a speaker's name
OFF = ("none", "null")  # values that turn a threshold off


class Kind(ABC):
    shape: ClassVar[Shape] = "text"  # `parse` takes one value, a list of items, or parts by name

    def parse(self, name: str, sent: Any) -> Any:
        """Raises InvalidRequestError, which names the field."""
        raise NotImplementedError  # a file is not parsed here

    @abstractmethod
    def schema(self) -> Schema:
        """JSON schema of the values, without a description."""


class AudioFile(Kind):
    shape = "file"

    def schema(self) -> Schema:
        return {"type": "string", "format": "binary"}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    examples: tuple[str, ...] = ()
    longest: int = 0  # characters; 0: the limit on the body is enough

    def parse(self, name: str, sent: Any) -> str:
        if not isinstance(sent, str):
            raise _refusal(name, "a text", sent)
        if self.longest and len(sent) > self.longest:
            raise InvalidRequestError(
                f"'{name}' has {len(sent)} characters; at most {self.longest} are allowed",
                param=name,
                code="string_above_max_length",
            )
        if not sent.isascii() and any("\ud800" <= letter <= "\udfff" for letter in sent):
            raise _refusal(name, "valid Unicode, without half of a surrogate pair", sent)
        return sent

    def schema(self) -> Schema:
        return {"type": "string"} | ({"examples": list(self.examples)} if self.examples else {})


class SpeakerName(Kind):
    def parse(self, name: str, sent: Any) -> str:
        found = sent.strip() if isinstance(sent, str) else ""
        if not found or len(found) > MAX_NAME or not found.isprintable():
            raise _refusal(name, f"a name of 1 to {MAX_NAME} characters on one line", sent)
        return found

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": MAX_NAME}


class Language(Kind):
    """An ISO-639-1 code or an English name; parsed as the code."""

    def parse(self, name: str, sent: Any) -> str:
        code = language_code(sent) if isinstance(sent, str) else None
        if code is None:
            raise InvalidRequestError(
                f"{shown(sent)} is not a known language; send an ISO-639-1 code such as "
                f"'en', an English name such as 'english', or leave it out to have it detected",
                param=name,
                code="invalid_language_format",
            )
        return code

    def schema(self) -> Schema:
        return {"type": "string", "examples": ["en"]}


class Boolean(Kind):
    def parse(self, name: str, sent: object) -> bool:
        match str(sent).strip().lower():  # JSON has true and false
            case "true" | "1":
                return True
            case "false" | "0":
                return False
        raise _refusal(name, "true or false", sent)

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Number(Kind):
    low: float
    high: float

    def parse(self, name: str, sent: Any) -> float:
        try:
            found = math.nan if isinstance(sent, bool) else float(sent)
        except (ValueError, TypeError, OverflowError):
            found = math.nan
        if not self.low <= found <= self.high:
            raise _refusal(name, f"a number from {self.low:g} to {self.high:g}", sent)
        return found + 0.0  # no negative zero

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Threshold(Kind):
    """A number, or "none" to turn it off. Empty texts are refused: SDKs send them for None, which
    could mean off or the default.
    """

    low: float
    high: float

    def parse(self, name: str, sent: str) -> float | None:
        text = sent.strip().lower()
        if text in OFF:
            return None
        if not text:
            raise InvalidRequestError(
                f"'{name}' is empty; send a number, or 'none' to turn it off", param=name
            )
        return Number(self.low, self.high).parse(name, sent)

    def schema(self) -> Schema:
        off = {"type": "string", "enum": list(OFF)}
        return {"oneOf": [Number(self.low, self.high).schema(), off]}


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    low: int  # at least 0
    high: int

    def parse(self, name: str, sent: Any) -> int:
        if isinstance(sent, float) and sent.is_integer():
            sent = int(sent)  # JavaScript has no integers
        digits = str(sent).strip()
        is_number = len(digits) <= len(str(self.high)) and digits.isascii() and digits.isdigit()
        if not is_number or not self.low <= int(digits) <= self.high:
            raise _refusal(name, f"a whole number from {self.low} to {self.high}", sent)
        return int(digits)

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    choices: tuple[str, ...]

    def parse(self, name: str, sent: Any) -> str:
        value = sent.strip() if isinstance(sent, str) else ""
        if value not in self.choices:
            offered = ", ".join(f"'{one}'" for one in self.choices)
            raise InvalidRequestError(
                f"{shown(sent)} is not a {name}; use one of {offered}",
                param=name,
                code="invalid_value",
            )
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.choices)}


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    item: Kind
    most: int = 0  # 0: the limit on the body is enough
    shape = "list"

    def parse(self, name: str, sent: Any) -> tuple[Any, ...]:
        if not isinstance(sent, list):
            raise _refusal(name, "a list of texts", sent)
        for text in sent:
            if not isinstance(text, str):
                raise _refusal(name, "a list of texts", text)
        if self.most and len(sent) > self.most:
            raise InvalidRequestError(
                f"'{name}' has {len(sent)} items; at most {self.most} are allowed",
                param=name,
                code="array_above_max_length",
            )
        return tuple(self.item.parse(name, text) for text in sent)

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


@dataclass(frozen=True, slots=True)
class Times(Kind):
    """Seconds that do not decrease, as list items or as one text with commas."""

    high: float
    shape = "list"

    def parse(self, name: str, sent: list[Any]) -> tuple[float, ...]:
        texts = [part for item in sent for part in str(item).split(",") if part.strip()]
        seconds = tuple(Number(0.0, self.high).parse(name, text) for text in texts)
        if list(seconds) != sorted(seconds):
            raise InvalidRequestError(f"the times of '{name}' must not decrease", param=name)
        return seconds

    def schema(self) -> Schema:
        return {"type": "array", "items": Number(0, self.high).schema()}


@dataclass(frozen=True, slots=True)
class AudioUrl(Kind):
    """A data URL with audio, parsed as the file's bytes. Error messages do not repeat the value."""

    longest: int  # of the file, in bytes

    def parse(self, name: str, sent: Any) -> bytes:
        head, _, letters = sent.partition(",")
        kind = head.lower().removeprefix("data:")
        if kind == head.lower() or not kind.endswith(";base64"):
            raise self._refused(name, "is no data URL with base64 ('data:audio/wav;base64,...')")
        if not kind.startswith(("audio/", "video/", "application/octet-stream")):
            raise self._refused(name, "is a data URL of another type than audio")
        if len(letters) > base64_length(self.longest):
            raise self._refused(name, f"has more than {self.longest} bytes")
        try:
            content = binascii.a2b_base64(letters, strict_mode=True)
        except ValueError as error:
            raise self._refused(name, f"is not base64: {error}") from None
        if not content:
            raise self._refused(name, "is empty")
        return content

    def schema(self) -> Schema:
        return {"type": "string", "format": "uri"}

    def _refused(self, name: str, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"an item of '{name}' {why}", param=name, code="invalid_value")


def base64_length(n_bytes: int) -> int:
    return -(-n_bytes // 3) * 4


def as_object(name: str, sent: object) -> Mapping[str, Any]:
    """Raises InvalidRequestError."""
    if not isinstance(sent, Mapping):
        raise _refusal(name, "an object", sent)
    return sent


def shown(value: object) -> str:
    """A client's value, quoted, on one line and cut to `SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refusal(name: str, expected: str, sent: object) -> InvalidRequestError:
    return InvalidRequestError(f"'{name}' must be {expected}, not {shown(sent)}", param=name)


MAX_CHUNKING_MS = 30_000  # the length of a window
USUAL = Chunking()
PARTS: dict[str, tuple[Kind, str]] = {
    "threshold": (Number(0, 1), "From which probability on it is speech."),
    "prefix_padding_ms": (Integer(0, MAX_CHUNKING_MS), "Kept before speech."),
    "silence_duration_ms": (Integer(0, MAX_CHUNKING_MS), "A pause that ends it."),
}


@dataclass(frozen=True, slots=True)
class VoiceCuts(Kind):
    """An object of type `server_vad`, or `auto`, which is parsed as None."""

    shape = "object"

    def parse(self, name: str, sent: Mapping[str, str]) -> Chunking | None:
        kind, rest = sent.get("type"), {key: sent[key] for key in sent if key != "type"}
        if kind in ("auto", "") and not rest:
            return None
        if kind != "server_vad":
            raise InvalidRequestError(
                f"'{name}' must be 'auto' or an object of type 'server_vad', not {shown(sent)}",
                param=name,
                code="invalid_value",
            )
        if unknown := rest.keys() - PARTS.keys():
            raise InvalidRequestError(
                f"'{name}' has no {shown(min(unknown))}; it takes: {', '.join(('type', *PARTS))}",
                param=name,
                code="unknown_parameter",
            )
        return Chunking(
            **{
                key: PARTS[key][0].parse(f"{name}[{key}]", text)
                for key, text in rest.items()
                if text.strip()
            }
        )

    def schema(self) -> Schema:
        parts = {
            key: {**kind.schema(), "description": text, "default": getattr(USUAL, key)}
            for key, (kind, text) in PARTS.items()
        }
        voice = {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string", "enum": ["server_vad"]}, **parts},
            "additionalProperties": False,
        }
        return {"oneOf": [{"type": "string", "enum": ["auto"]}, voice], "default": "auto"}


# ---- fields

Origin = Literal["OpenAI", "openai/whisper", "faster-whisper", "vLLM", "Mistral", "splitscribe"]

BOTH: tuple[Operation, ...] = ("transcribe", "translate")
ALL: tuple[Operation, ...] = (*BOTH, "align")
NO_ATTRIBUTE = ""  # `sets` of a field that `router.api.forms` handles itself

_DEFAULTS = TranscriptionParams(model="")


@dataclass(frozen=True, slots=True)
class RequestField:
    name: str
    kind: Kind
    help: str  # in Markdown, with names and values in backquotes
    origin: Origin = "OpenAI"  # the API that has it
    flag: str = ""  # on the command line, as openai/whisper's if it has one; "": none
    # Attribute of `TranscriptionParams`, such as "gates.avg_logprob"; None: the field's own name.
    sets: str | None = None
    tasks: tuple[Operation, ...] = BOTH  # the endpoints that take it
    may_be_empty: bool = True  # an empty text counts as not sent

    @property
    def attribute(self) -> str:
        return self.name if self.sets is None else self.sets

    @property
    def only_sequential(self) -> bool:
        return self.attribute.startswith("sequential.")

    @property
    def default(self) -> Any:
        """Default of the attribute; None without one, or if `sets` is `NO_ATTRIBUTE`."""
        return attrgetter(self.attribute)(_DEFAULTS) if self.attribute else None

    @property
    def description(self) -> str:
        condition = "Only with `decoding=sequential`. " if self.only_sequential else ""
        off = " `none` turns it off." if isinstance(self.kind, Threshold) else ""
        return f"{condition}{self.help}{off}"

    @property
    def spelling(self) -> str:
        return f"{self.name}[]" if self.kind.shape == "list" else self.name
