"""The kind of values of `chunking_strategy`: how the voice detector cuts, or `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import InvalidRequestError
from router.api.kinds import Integer, Kind, Number, Schema, shown
from router.api.params import Chunking

MAX_CHUNKING_MS = 30_000  # a window
USUAL = Chunking()
PARTS: dict[str, tuple[Kind, str]] = {
    "threshold": (Number(0, 1), "From which probability on it is speech."),
    "prefix_padding_ms": (Integer(0, MAX_CHUNKING_MS), "Kept before speech."),
    "silence_duration_ms": (Integer(0, MAX_CHUNKING_MS), "A pause that ends it."),
}


@dataclass(frozen=True, slots=True)
class VoiceCuts(Kind):
    """An object of type `server_vad`; None for `auto`, which leaves the cuts to the server."""

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
