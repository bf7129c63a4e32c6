"""Single fields of a form: their spellings, and their values checked one by one.

`collect` sorts (name, text) pairs by field, in every spelling that OpenAI's clients use: `name`,
`name[]` and `name[0]` for lists, `name[key]` for objects, JSON in place of either. The other
functions turn one text into one value or raise an error that names the field. Knows nothing of
what the fields mean together (`router.api.params`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequestError, UnsupportedValueError
from cluster.model.languages import language_code

SHOWN = 64  # characters of a client's value that an error message repeats
OFF = ("none", "null")  # how a threshold is turned off


@dataclass(frozen=True, slots=True)
class FormShape:
    """Which fields a form may have. `later`: fields of OpenAI's that are not offered here."""

    scalars: tuple[str, ...]
    lists: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every field as the documentation writes it."""
        return ("file", *self.scalars, *(f"{name}[]" for name in self.lists), *self.objects)


@dataclass(frozen=True, slots=True)
class FormValues:
    """A form, sorted. What was not sent is in none of the three."""

    scalars: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    objects: dict[str, dict[str, str]] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """A scalar without the blanks around it; None when it is empty or was not sent."""
        return self.scalars.get(name, "").strip() or None

    def sent(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that the form has with a content."""
        return [
            name for name in names if self.text(name) or name in self.lists or name in self.objects
        ]


def collect(fields: Iterable[tuple[str, str]], shape: FormShape) -> FormValues:
    """Sort a form by field.

    Raises:
        UnsupportedValueError: a field of OpenAI's that is not offered here.
        InvalidRequestError: an unknown field, or one that was sent more than once.
    """
    values = FormValues()
    for raw_name, value in fields:
        name, bracket, key = raw_name.partition("[")
        key = key.removesuffix("]")
        if name in shape.later:
            raise UnsupportedValueError(f"'{name}' is not supported by this server", param=name)
        if name in shape.lists and (not key or key.isdigit()):
            values.lists.setdefault(name, []).extend(_items(value))
        elif name in shape.objects and (key or not bracket):
            _add_to_object(values.objects, name, key, value)
        elif name in shape.scalars and not bracket:
            if name in values.scalars:
                raise repeated(name)
            values.scalars[name] = value
        else:
            raise _unknown(raw_name, shape)
    return values


def boolean(name: str, value: str | None) -> bool | None:
    """None when nothing was sent."""
    match (value or "").strip().lower():
        case "":
            return None
        case "true" | "1":
            return True
        case "false" | "0":
            return False
    raise InvalidRequestError(f"'{name}' must be true or false, not {shown(value)}", param=name)


def number(name: str, value: str | None, low: float, high: float) -> float | None:
    """A number in [low, high]; None when nothing was sent."""
    if value is None or not value.strip():
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise InvalidRequestError(
            f"'{name}' must be a number from {low:g} to {high:g}, not {shown(value)}", param=name
        )
    return found


def whole_number(name: str, value: str | None, low: int, high: int) -> int | None:
    """A whole number in [low, high], low >= 0; None when nothing was sent."""
    digits = (value or "").strip()
    if not digits:
        return None
    is_number = len(digits) <= len(str(high)) and digits.isascii() and digits.isdigit()
    if not is_number or not low <= int(digits) <= high:
        raise InvalidRequestError(
            f"'{name}' must be a whole number from {low} to {high}, not {shown(value)}", param=name
        )
    return int(digits)


def threshold(
    name: str, value: str | None, low: float, high: float, default: float | None
) -> float | None:
    """A number in [low, high], or None where the client turned it off.

    An SDK's None arrives as an empty text, so that cannot mean both "off" and "as usual".
    """
    if value is None:
        return default
    if value.strip().lower() in OFF:
        return None
    if not value.strip():
        raise InvalidRequestError(
            f"'{name}' is empty; send a number, or 'none' to turn it off", param=name
        )
    return number(name, value, low, high)


def choice(name: str, value: str | None, choices: Sequence[str]) -> str | None:
    """One of `choices`; None when nothing was sent."""
    if value is None or not value.strip():
        return None
    if value not in choices:
        offered = ", ".join(f"'{one}'" for one in choices)
        raise InvalidRequestError(
            f"{shown(value)} is no {name}; use one of {offered}", param=name, code="invalid_value"
        )
    return value


def language(value: str | None, known: Collection[str]) -> str | None:
    """The code of a code or an English name; None when nothing was sent."""
    if value is None or not value.strip():
        return None
    code = language_code(value)
    if code is None:
        raise InvalidRequestError(
            f"{shown(value)} is no language that is known here; send an ISO-639-1 code such as "
            f"'en', an English name such as 'english', or leave it out to have it detected",
            param="language",
            code="invalid_language_format",
        )
    if code not in known:
        raise UnsupportedValueError(
            f"this model does not know language {shown(value)}; "
            f"it knows: {', '.join(sorted(known))}",
            param="language",
        )
    return code


def times(name: str, items: Sequence[Any], high: float) -> tuple[float, ...]:
    """Seconds that never decrease, from list items or one text with commas."""
    texts = [part for item in items for part in str(item).split(",")]
    found = [number(name, text, 0.0, high) for text in texts if text.strip()]
    seconds = tuple(value for value in found if value is not None)
    if list(seconds) != sorted(seconds):
        raise InvalidRequestError(f"the times of '{name}' must not decrease", param=name)
    return seconds


def repeated(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{name}' was sent more than once; send it once", param=name)


def conflict(name: str, message: str) -> InvalidRequestError:
    """Two fields that do not go together; `name` is the one to change."""
    return InvalidRequestError(message, param=name, code="incompatible_parameters")


def shown(value: object) -> str:
    """A client's value, quoted, on one line and cut to a sensible length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _items(value: str) -> list[Any]:
    """The items of a JSON list, or the text itself."""
    if value.lstrip().startswith("["):
        try:
            items = json.loads(value)
            json.dumps(items, ensure_ascii=False).encode()  # JSON can spell half a character
        except (ValueError, RecursionError):
            return [value]
        return list(items)
    return [value]


def _add_to_object(objects: dict[str, dict[str, str]], name: str, key: str, value: str) -> None:
    """Take `name[key]=value`, or a whole object: JSON, or a bare word as its type."""
    known = objects.setdefault(name, {})
    parts: Mapping[str, Any]
    if key:
        parts = {key: value}
    elif value.lstrip().startswith("{"):
        try:
            parts = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"'{name}' is no JSON object", param=name) from None
    else:
        parts = {"type": value}
    if known.keys() & parts.keys():
        raise repeated(name)
    known.update((key, str(part)) for key, part in parts.items())


def _unknown(raw_name: str, shape: FormShape) -> InvalidRequestError:
    return InvalidRequestError(
        f"unknown field {shown(raw_name)}; this endpoint takes: {', '.join(shape.spellings)}",
        param=raw_name[:SHOWN],
        code="unknown_parameter",
    )
