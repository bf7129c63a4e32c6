"""What a field of a request is; all of them are declared in `router.api.request_fields`."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from router.api.kinds import Kind, Threshold
from router.api.params import Operation, TranscriptionParams

Origin = Literal["OpenAI", "openai/whisper", "faster-whisper", "vLLM", "Mistral", "splitscribe"]

BOTH: tuple[Operation, ...] = ("transcribe", "translate")
ALL: tuple[Operation, ...] = (*BOTH, "align")
NO_ATTRIBUTE = ""  # such a field sets no attribute: `router.api.forms` reads it

_DEFAULTS = TranscriptionParams(model="")


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request.

    flag: its flag on the command line, which is openai/whisper's if that has one; "": none.
    sets: the attribute of `TranscriptionParams` that it sets, dotted for one of its parts; None:
        the attribute with the field's own name.
    """

    name: str
    kind: Kind
    help: str  # in Markdown, with names and values in backquotes
    origin: Origin = "OpenAI"  # the API it comes from
    flag: str = ""
    sets: str | None = None
    tasks: tuple[Operation, ...] = BOTH  # whose endpoints take it
    may_be_empty: bool = True  # an empty text means that it was not sent

    @property
    def attribute(self) -> str:
        return self.name if self.sets is None else self.sets

    @property
    def only_sequential(self) -> bool:
        return self.attribute.startswith("sequential.")

    @property
    def default(self) -> Any:
        """Of what it sets; None if there is none, or several fields set it together."""
        return attrgetter(self.attribute)(_DEFAULTS) if self.attribute else None

    @property
    def description(self) -> str:
        condition = "Only with `decoding=sequential`. " if self.only_sequential else ""
        off = " `none` turns it off." if isinstance(self.kind, Threshold) else ""
        return f"{condition}{self.help}{off}"

    @property
    def spelling(self) -> str:
        return f"{self.name}[]" if self.kind.shape == "list" else self.name
