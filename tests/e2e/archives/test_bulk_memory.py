"""An archive of 200 hours takes no more memory than one of 20."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from cluster.archives.inputs import list_items
from cluster.archives.outputs import Archive, Outputs
from cluster.archives.places import Place
from cluster.archives.run import RunProgress, look_at, run_archive
from cluster.serve.bulk.engine import BulkResult
from router.api.params import TranscriptionParams
from router.interface import StageTimings
from router.transcript import Segment, Transcript, Word

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILE_S = 300
N_FILES = 2400  # 200 hours
SEGMENT_S, WORDS = 5, 12


class FreeEngine:
    """Answers at once with as much text as a talk of five minutes has."""

    def params(self, fields: Any, task: Any) -> TranscriptionParams:
        return TranscriptionParams("whisper-1")

    async def transcribe(
        self,
        upload: Path | bytes,
        params: TranscriptionParams,
        *,
        name: str = "",
        on_progress: object = None,
    ) -> BulkResult:
        segments = tuple(make_segment(i) for i in range(FILE_S // SEGMENT_S))
        text = "".join(segment.text for segment in segments).strip()
        transcript = Transcript("transcribe", "en", FILE_S, text, segments)
        return BulkResult(transcript, StageTimings(), (), params)


def make_segment(index: int) -> Segment:
    start = float(index * SEGMENT_S)
    words = tuple(Word(start + 0.4 * i, start + 0.4 * (i + 1), " word", 0.9) for i in range(WORDS))
    tokens = tuple(range(1000, 1000 + 2 * WORDS))
    text = " word" * WORDS
    return Segment(index, 0, start, start + SEGMENT_S, text, tokens, 0.0, -0.2, 0.9, 0.0, (), words)


def test_memory_does_not_follow_the_size_of_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    for i in range(N_FILES):
        with (folder / f"{i:04d}.mp3").open("wb") as file:
            file.truncate(16_000 * FILE_S)  # of nothing: it takes no room on the disk
    archive = Archive(Place.of(str(tmp_path / "texts")))
    memory: list[int] = []

    class Measuring(FreeEngine):
        async def transcribe(self, *args: Any, **options: Any) -> BulkResult:
            memory.append(taken_bytes())
            return await super().transcribe(*args, **options)

    with (
        Outputs.opened(archive) as outputs,
        RunProgress(Console(quiet=True)) as progress,
    ):
        listing = look_at(list_items([str(folder)]), outputs, progress)
        engine: Any = Measuring()
        asyncio.run(run_archive(archive, outputs, engine, progress, listing))
    assert progress.about_s == N_FILES * FILE_S
    assert progress.n_done == N_FILES
    assert progress.done_s == N_FILES * FILE_S
    tenth = len(memory) // 10
    first, last = max(memory[: 2 * tenth]), max(memory)
    print(f"{first / 2**20:.0f} MiB after a fifth of it, {last / 2**20:.0f} MiB at most")
    assert last < first + 150 * 2**20


def taken_bytes() -> int:
    """By this process and those that it has started, without what they share."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss - process.memory_info().shared
        except psutil.NoSuchProcess:
            continue
    return total
