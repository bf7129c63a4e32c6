"""What a benchmark of bulk work needs: files of minutes, and their windows, cut already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmark.shared.clips import Clip
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.common.settings import RouterSettings
from cluster.demo.samples import SAMPLES, sample_path
from cluster.serve.bulk.engine import BulkEngine
from router.audio.pool import AudioPool
from router.audio.windows import Window

START_S = 120.0
FORM = (("model", "whisper-1"), ("language", "en"), ("temperature", "0"), ("fallback", "false"))


def write_talks(folder: Path, n_files: int, seconds: float) -> list[Path]:
    """WAV files of the bundled recordings, each beginning elsewhere in them."""
    speech = np.concatenate([Clip(name, sample_path(name)).pcm() for name in SAMPLES])
    n_samples = round(seconds * SAMPLE_RATE)
    files = []
    for i in range(n_files):
        files.append(folder / f"talk-{i:03d}.wav")
        turned = np.roll(speech, -(i * len(speech)) // n_files)
        files[-1].write_bytes(wav_bytes(np.resize(turned, n_samples)))
    return files


@dataclass(frozen=True, slots=True)
class _Cut:
    """One file's windows, as an `AudioStream` that has all of them at once."""

    windows: tuple[Window, ...]
    duration_s: float
    expected_s: float | None = None
    decode_s: float = 0.0

    async def __aiter__(self) -> AsyncIterator[Window]:
        for window in self.windows:
            yield window


class CutAudio:
    """Windows of files that were cut before; stands for `AudioPool` in a transcriber."""

    def __init__(self, cuts: dict[Path, _Cut]) -> None:
        self._cuts = cuts

    @classmethod
    async def of(cls, files: Sequence[Path], settings: RouterSettings) -> Self:
        """Cut them as a router does."""
        pool = AudioPool(settings)
        await pool.start()
        cuts = {}
        try:
            for file in files:
                async with pool.open(file, request_id=file.name, timeout_s=START_S) as stream:
                    windows = tuple([window async for window in stream])
                    cuts[file] = _Cut(windows, stream.duration_s)
        finally:
            await pool.close()
        return cls(cuts)

    @property
    def n_windows(self) -> int:
        return sum(len(cut.windows) for cut in self._cuts.values())

    @asynccontextmanager
    async def open(self, upload: Path, **_: Any) -> AsyncIterator[Any]:
        yield self._cuts[upload]

    def open_whole(self, upload: Path, **_: Any) -> Any:
        raise NotImplementedError("sequential mode reads files whole")


async def transcribe_all(engine: BulkEngine, files: Sequence[Path], at_once: int) -> None:
    """Every file, so many at a time."""
    params = engine.params(FORM)
    slots = asyncio.Semaphore(at_once)

    async def one(file: Path) -> None:
        async with slots:
            await engine.transcribe(file, params, name=file.name)

    await asyncio.gather(*map(one, files))


def hours_per_hour(audio_s: float, since: float) -> float:
    """Hours of audio in an hour, of work that began at `since` of `perf_counter`."""
    return audio_s / (time.perf_counter() - since)
