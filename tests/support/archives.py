"""Archives for tests: items without audio, and an engine that hears what a file's name says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.common.errors import InvalidAudioError
from cluster.serve.bulk.engine import BulkResult, OnProgress
from router.api.forms import parse_transcription
from router.api.params import TranscriptionParams
from router.interface import StageTimings
from tests.support.router_fakes import make_transcript

HEARD_BYTES = 40  # of a file


class Stopped(BaseException):
    pass


@dataclass
class FakeEngine:
    """Hears how a file begins; one that begins with "broken" is no audio.

    most: files worked on at a time. stop_after: files after which the run ends.
    """

    heard: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    duration_s: float = 2.5
    stop_after: int | None = None

    def params(self, fields: Iterable[tuple[str, str]], task: Any) -> TranscriptionParams:
        return parse_transcription(fields, ("en", "de"))

    async def transcribe(
        self,
        upload: Path | bytes,
        params: TranscriptionParams,
        *,
        name: str = "",
        on_progress: OnProgress | None = None,
    ) -> BulkResult:
        content = (
            upload if isinstance(upload, bytes) else await asyncio.to_thread(upload.read_bytes)
        )
        if len(self.heard) == self.stop_after:
            raise Stopped
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            text = content[:HEARD_BYTES].decode()
            self.heard.append(text)
            if text.startswith("broken"):
                raise InvalidAudioError("this is no audio", param="file")
            if on_progress is not None:
                on_progress(self.duration_s, self.duration_s)
            transcript = make_transcript(f" {text}", duration_s=self.duration_s)
            return BulkResult(transcript, StageTimings(windows=1), (), params)
        finally:
            self.running -= 1

    @asynccontextmanager
    async def opened(self, told: Any = None) -> AsyncIterator[Any]:
        yield self


def same_answer(ours: Any, theirs: Any) -> bool:
    """The same text, tokens and times; scores may differ in what float32 rounds otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys()
        return keys == theirs.keys() and all(same_answer(ours[k], theirs[k]) for k in keys)
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(same_answer(a, b) for a, b in pairs)
    if isinstance(ours, float) or isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-3)
    return bool(ours == theirs)
