"""The field `chunking_strategy`: how the voice detector cuts; `auto` leaves it to the server."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import InvalidRequestError
from router.api.fields import conflict, number, shown, whole_number
from router.api.params import Chunking, Decoding

NAME = "chunking_strategy"
MAX_CHUNKING_MS = 30_000  # a window


def chunking(objects: Mapping[str, Mapping[str, str]], decoding: Decoding) -> Chunking | None:
    """None where the cuts are left to the server.

    Raises:
        InvalidRequestError: no such strategy, a bound is crossed, or the decoding makes no cuts.
    """
    if NAME not in objects:
        return None
    fields = dict(objects[NAME])
    kind, rest = fields.get("type"), {key: fields[key] for key in fields if key != "type"}
    if kind in ("auto", "") and not rest:
        return None
    if kind != "server_vad":
        raise InvalidRequestError(
            f"'{NAME}' must be 'auto' or an object of type 'server_vad', not {shown(fields)}",
            param=NAME,
            code="invalid_value",
        )
    if unknown := rest.keys() - {"threshold", "prefix_padding_ms", "silence_duration_ms"}:
        raise InvalidRequestError(
            f"'{NAME}' has no {shown(min(unknown))}; it takes: type, threshold, "
            f"prefix_padding_ms, silence_duration_ms",
            param=NAME,
            code="unknown_parameter",
        )
    if decoding == "sequential":
        raise conflict(NAME, f"'{NAME}' cuts at pauses, which decoding=sequential does not")
    return _voice_cuts(rest)


def _voice_cuts(values: Mapping[str, str]) -> Chunking:
    usual = Chunking()
    level = number(f"{NAME}[threshold]", values.get("threshold"), 0.0, 1.0)

    def duration(key: str, default: int) -> int:
        found = whole_number(f"{NAME}[{key}]", values.get(key), 0, MAX_CHUNKING_MS)
        return default if found is None else found

    return Chunking(
        threshold=usual.threshold if level is None else level,
        prefix_padding_ms=duration("prefix_padding_ms", usual.prefix_padding_ms),
        silence_duration_ms=duration("silence_duration_ms", usual.silence_duration_ms),
    )
