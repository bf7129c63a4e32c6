"""What is asked for of an archive: where its transcripts go, and how its files are transcribed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.archives.places import Place
from cluster.common.messages import Task
from router.api.params import ResponseFormat

FILES_AT_ONCE = 8
FORMATS: dict[str, ResponseFormat] = {
    "json": "verbose_json",
    "srt": "srt",
    "vtt": "vtt",
    "txt": "text",
}
Fields = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Archive:
    """What is asked for.

    fields: of the file endpoint, for every file. model: whose texts they are.
    """

    where: Place
    fields: Fields = field(default_factory=dict)
    task: Task = "transcribe"
    model: str = ""
    formats: tuple[str, ...] = ("json",)
    retry_failed: bool = False
    files_at_once: int = FILES_AT_ONCE

    @property
    def settings(self) -> dict[str, Any]:
        """All that texts depend on, as JSON has it."""
        fields = {k: v if isinstance(v, str) else list(v) for k, v in self.fields.items()}
        return {"model": self.model, "task": self.task, "fields": fields}

    @property
    def words(self) -> bool:
        return "word" in self.fields.get("timestamp_granularities", ())


def pairs_of(fields: Fields) -> tuple[tuple[str, str], ...]:
    """As a form has them, with the application's first model where none is named."""
    return tuple(
        (name, text)
        for name, content in {"model": "whisper-1", **fields}.items()
        for text in ([content] if isinstance(content, str) else content)
    )
