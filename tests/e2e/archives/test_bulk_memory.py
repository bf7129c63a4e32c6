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
from tests.support.archives import FakeEngine
from tests.support.router_fakes import make_transcript

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILE_S = 300
N_FILES = 2400  # 200 hours
SEGMENT_S, WORDS = 5, 12


class FreeEngine(FakeEngine):
    def __init__(self) -> None:
        self.memory: list[int] = []

    async def transcribe(self, *args: Any, **options: Any) -> BulkResult:
        self.memory.append(taken_bytes())
        texts = [" word" * WORDS] * (FILE_S // SEGMENT_S)
        transcript = make_transcript(*texts, duration_s=FILE_S)
        return BulkResult(transcript, StageTimings(), (), TranscriptionParams("whisper-1"))


def test_memory_does_not_follow_the_size_of_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    for i in range(N_FILES):
        with (folder / f"{i:04d}.mp3").open("wb") as file:
            file.truncate(16_000 * FILE_S)  # of nothing: it takes no room on the disk
    archive = Archive(Place.of(str(tmp_path / "texts")))
    engine: Any = FreeEngine()
    progress = RunProgress(Console(quiet=True))
    with Outputs.opened(archive) as outputs:
        listing = look_at(list_items([str(folder)]), outputs, progress)
        asyncio.run(run_archive(archive, outputs, engine, progress, listing))
    assert progress.about_s == N_FILES * FILE_S
    assert progress.n_done == N_FILES
    assert progress.done_s == N_FILES * FILE_S
    memory = engine.memory
    tenth = len(memory) // 10
    first, last = max(memory[: 2 * tenth]), max(memory)
    print(f"{first / 2**20:.0f} MiB after a fifth of it, {last / 2**20:.0f} MiB at most")
    assert last < first + 150 * 2**20


def taken_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
