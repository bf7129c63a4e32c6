"""Checks single values of a client's session update: their types and sizes.

Each function takes the value as it came and the parameter's name for messages, and raises
InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.model.text.languages import language_code

SHOWN = 64  # characters of a client's value that an error message repeats

Sent = Mapping[str, Any]


def mapping(sent: object, param: str) -> Sent:
    if not isinstance(sent, Mapping):
        raise refusal(param, "an object", sent)
    return sent


def text_of(sent: object, param: str, longest: int) -> str:
    if not isinstance(sent, str):
        raise refusal(param, "a string", sent)
    if len(sent) > longest:
        raise InvalidRequestError(
            f"'{param}' has {len(sent)} characters; at most {longest} are allowed",
            param=param,
            code="string_above_max_length",
        )
    if not sent.isascii() and any("\ud800" <= letter <= "\udfff" for letter in sent):
        raise refusal(param, "valid Unicode, without half of a surrogate pair", sent)
    return sent


def texts_of(sent: object, param: str, most: int, longest: int) -> tuple[str, ...]:
    if sent is None:
        return ()
    if not isinstance(sent, list):
        raise refusal(param, "an array of strings", sent)
    if len(sent) > most:
        raise InvalidRequestError(
            f"'{param}' has {len(sent)} items; at most {most} are allowed",
            param=param,
            code="array_above_max_length",
        )
    return tuple(text_of(one, f"{param}[{i}]", longest) for i, one in enumerate(sent))


def language_of(sent: object, param: str) -> str:
    code = language_code(text_of(sent, param, SHOWN))
    if code is None:
        raise InvalidRequestError(
            f"{shown(sent)} is not a language that this server knows; send an ISO-639-1 code such "
            f"as 'en', or leave the field out to have the language detected",
            param=param,
            code="invalid_language_format",
        )
    return code


def integer(sent: object, param: str, low: int, high: int) -> int:
    if isinstance(sent, float) and sent.is_integer():
        sent = int(sent)  # from JavaScript, whose numbers are all of one kind
    if isinstance(sent, bool) or not isinstance(sent, int) or not low <= sent <= high:
        raise refusal(param, f"an integer from {low} to {high}", sent)
    return sent


def number(sent: object, param: str, low: float, high: float) -> float:
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not low <= sent <= high:
        raise refusal(param, f"a number from {low:g} to {high:g}", sent)
    return float(sent)


def check_choice(sent: object, param: str, allowed: Sequence[str]) -> None:
    if sent not in allowed:
        raise refusal(param, "one of " + ", ".join(f"'{one}'" for one in allowed), sent)


def refusal(param: str, expected: str, sent: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}' must be {expected}, got {shown(sent)}", param=param, code="invalid_value"
    )


def shown(sent: object) -> str:
    text = repr(sent)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
