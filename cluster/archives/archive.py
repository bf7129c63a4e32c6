"""What is asked for of an archive: where its transcripts go, and how its files are transcribed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.archives.places import Place
from cluster.messages import Task
from router.api.params import ResponseFormat

FILES_AT_ONCE = 8
FORMATS: dict[str, ResponseFormat] = {
    "json": "verbose_json",
    "srt": "srt",
    "vtt": "vtt",
    "txt": "text",
}
Fields = Mapping[str, str | Sequence[str]]
Match = Literal["stat", "content"]


@dataclass(frozen=True, slots=True)
class Archive:
    """What is asked for.

    fields: of the file endpoint, for every file. model: whose texts they are, for the ledger.
    match: what is done is known by path, size and mtime, or where these differ by content.
    """

    where: Place
    fields: Fields = field(default_factory=dict)
    task: Task = "transcribe"
    model: str = ""
    formats: tuple[str, ...] = ("json",)
    match: Match = "stat"
    retry_failed: bool = False
    transcribers: int = 1
    files_at_once: int = FILES_AT_ONCE

    @property
    def settings(self) -> str:
        """A digest of all that texts depend on."""
        content = [self.model, self.task, sorted((k, v) for k, v in self.fields.items())]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()

    @property
    def words(self) -> bool:
        return "word" in self.fields.get("timestamp_granularities", ())
