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

    help: in Markdown, with names and values in backquotes.
    origin: the API that the field comes from; clients send the fields that are not OpenAI's in
        `extra_body` of its SDKs.
    flag: its flag on the command line, which is openai/whisper's if that has one; "": none.
    sets: the attribute of `TranscriptionParams` that it sets, dotted for one of its parts; None:
        the attribute with the field's own name.
    tasks: whose endpoints take it.
    may_be_empty: whether an empty text means that the field was not sent.
    """

    name: str
    kind: Kind
    help: str
    origin: Origin = "OpenAI"
    flag: str = ""
    sets: str | None = None
    tasks: tuple[Operation, ...] = BOTH
    may_be_empty: bool = True

    @property
    def attribute(self) -> str:
        return self.name if self.sets is None else self.sets

    @property
    def only_sequential(self) -> bool:
        """Whether it needs `decoding=sequential`."""
        return self.attribute.startswith("sequential.")

    @property
    def default(self) -> Any:
        """The default of what it sets; None if there is none, or several fields set it together."""
        return attrgetter(self.attribute)(_DEFAULTS) if self.attribute else None

    @property
    def description(self) -> str:
        """The full description, in Markdown: its help, when it applies, and how to turn it off."""
        condition = "Only with `decoding=sequential`. " if self.only_sequential else ""
        off = " `none` turns it off." if isinstance(self.kind, Threshold) else ""
        return f"{condition}{self.help}{off}"

    @property
    def spelling(self) -> str:
        """The name as it is written in the documentation."""
        return f"{self.name}[]" if self.kind.shape == "list" else self.name
