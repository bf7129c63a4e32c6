"""What benchmarks of bulk work share: files of minutes, windows that are cut already, a load."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmark.shared.clips import Clip
from cluster.archives.transcriber import unlimited_engine
from cluster.cli.batch.application import joined_cluster
from cluster.demo.recipe.speech.wav import wav_bytes
from cluster.demo.samples import SAMPLES, sample_path
from cluster.idle_threads import run_when_idle
from cluster.messages import SAMPLE_RATE
from cluster.serve.bulk.engine import BulkEngine
from cluster.settings import RouterSettings
from router.audio.pool import AudioPool
from router.audio.windows import Window

START_S, STOP_S = 120.0, 20.0
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


class BulkLoad:
    """Bulk work without an end, in a process of its own, as that of `splitscribe batch` is."""

    def __init__(self, address: str, files: Sequence[Path], at_once: int) -> None:
        """Join the cluster at `address`; no work is begun before `start`."""
        context = multiprocessing.get_context("spawn")
        self._done_s = context.Value("d", 0.0)
        self._ready, self._runs, self._idle = (context.Event() for _ in range(3))
        shared = (self._done_s, self._ready, self._runs, self._idle)
        self._process = context.Process(
            target=_run_load, args=(address, list(files), at_once, shared), daemon=False
        )
        self._process.start()
        if not self._ready.wait(START_S):
            self.close()
            raise SystemExit("the bulk load did not start")

    @property
    def done_s(self) -> float:
        """Seconds of audio so far."""
        return float(self._done_s.value)

    def start(self) -> None:
        self._idle.clear()
        self._runs.set()

    def stop(self) -> None:
        """Give up what is being transcribed, and wait until that has ended."""
        self._runs.clear()
        self._idle.wait(START_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.join(STOP_S)
        self._process.kill()
        self._process.join()


def _run_load(address: str, files: list[Path], at_once: int, shared: tuple[Any, ...]) -> None:
    with joined_cluster(address):
        run_when_idle()  # as `Transcriber` does
        asyncio.run(_load(files, at_once, *shared))


async def _load(
    files: list[Path], at_once: int, done_s: Any, ready: Any, runs: Any, idle: Any
) -> None:
    async with unlimited_engine() as engine:
        ready.set()
        while True:
            while not runs.is_set():  # noqa: ASYNC110 - an event of another process
                await asyncio.sleep(0.05)
            workers = [
                asyncio.create_task(_worker(engine, files[i:] + files[:i], done_s))
                for i in range(at_once)
            ]
            while runs.is_set():  # noqa: ASYNC110 - an event of another process
                await asyncio.sleep(0.05)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            idle.set()


async def _worker(engine: BulkEngine, files: list[Path], done_s: Any) -> None:
    params, before_s = engine.params(FORM), 0.0

    def note(now_s: float, _: float) -> None:
        nonlocal before_s
        done_s.value += max(0.0, now_s - before_s)
        before_s = now_s

    while True:
        for file in files:
            before_s = 0.0
            await engine.transcribe(file, params, on_progress=note)


def hours_per_hour(audio_s: float, since: float) -> float:
    """Hours of audio in an hour, of work that began at `since` of `perf_counter`."""
    return audio_s / (time.perf_counter() - since)
