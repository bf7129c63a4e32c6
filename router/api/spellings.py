"""Sorts a form by field, in every spelling that OpenAI's clients use.

These are `name` for a text; `name[]` and `name[0]` for lists; `name[key]` for objects; and JSON in
place of either. Values are not looked at: `router.api.kinds` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.api.documents import repeated
from router.api.kinds import SHOWN, shown
from router.api.request_field import RequestField

Sent = dict[str, Any]  # by field: a text, a list of items, or an object's parts by name


def collect(
    pairs: Iterable[tuple[str, str]], fields: Mapping[str, RequestField], refused: Collection[str]
) -> Sent:
    """Sort (name, text) pairs by field. A field that was not sent is not in the result.

    Args:
        fields: what the endpoint takes, by name.
        refused: fields of OpenAI's that are not offered here.

    Raises:
        UnsupportedValueError: one of `refused` was sent.
        InvalidRequestError: an unknown field, or one that was sent more than once.
    """
    sent: Sent = {}
    for raw_name, text in pairs:
        name, bracket, key = raw_name.partition("[")
        key = key.removesuffix("]")
        if name in refused:
            raise UnsupportedValueError(f"'{name}' is not supported by this server", param=name)
        shape = fields[name].kind.shape if name in fields else None
        if shape == "list" and (not key or key.isdigit()):
            sent.setdefault(name, []).extend(_items(text))
        elif shape == "object" and (key or not bracket):
            _add_to_object(sent.setdefault(name, {}), name, key, text)
        elif shape == "text" and not bracket:
            if name in sent:
                raise repeated(name)
            sent[name] = text
        else:
            raise _unknown(raw_name, fields)
    return sent


def _items(text: str) -> list[Any]:
    """The items of a JSON list, or the text itself."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
            json.dumps(items, ensure_ascii=False).encode()  # JSON can spell half a character
        except (ValueError, RecursionError):
            return [text]
        return list(items)
    return [text]


def _add_to_object(known: dict[str, str], name: str, key: str, text: str) -> None:
    """Take `name[key]=text`, or a whole object: JSON, or a bare word as its type."""
    parts: Mapping[str, Any]
    if key:
        parts = {key: text}
    elif text.lstrip().startswith("{"):
        try:
            parts = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"'{name}' is no JSON object", param=name) from None
    else:
        parts = {"type": text}
    if known.keys() & parts.keys():
        raise repeated(name)
    known.update((key, str(part)) for key, part in parts.items())


def _unknown(raw_name: str, fields: Mapping[str, RequestField]) -> InvalidRequestError:
    offered = ", ".join(field.spelling for field in fields.values())
    return InvalidRequestError(
        f"unknown field {shown(raw_name)}; this endpoint takes: {offered}",
        param=raw_name[:SHOWN],
        code="unknown_parameter",
    )
