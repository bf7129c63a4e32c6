"""What benchmarks of bulk work share: files of minutes, windows that are cut already, a load."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmark.shared.clips import Clip
from benchmark.shared.speech.wav import wav_bytes
from cluster.archives.transcriber import unlimited_engine
from cluster.cli.batch.application import joined_cluster
from cluster.demo.samples import SAMPLES, sample_path
from cluster.idle_threads import run_when_idle
from cluster.messages import SAMPLE_RATE
from cluster.serve.bulk.engine import BulkEngine
from cluster.settings import RouterSettings
from router.audio.pool import AudioPool
from router.audio.windows import Window

START_S, LOOK_S = 120.0, 0.05
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
    """Bulk work without an end, in a process of Ray's, as that of `splitscribe batch` is.

    The operating system shares cores out between sessions first, so one of its own would not do.
    Both sides see the same numbers in a file: the seconds of audio done, and flags.
    """

    def __init__(self, address: str, files: Sequence[Path], at_once: int) -> None:
        """Join the cluster at `address`; no work is begun before `start`."""
        self._open = ExitStack()
        path = Path(self._open.enter_context(tempfile.TemporaryDirectory())) / "numbers"
        path.write_bytes(bytes(8 * len(_Numbers)))
        self._numbers = np.memmap(path, np.float64)
        self._open.enter_context(joined_cluster(address))
        import ray

        begin = ray.remote(num_cpus=0)(_run_load).remote
        self._load = begin(str(path), list(files), at_once)
        self._open.callback(ray.cancel, self._load, force=True)
        self._wait(_Numbers.READY)

    @property
    def done_s(self) -> float:
        """Seconds of audio so far."""
        return float(self._numbers[_Numbers.DONE_S])

    def start(self) -> None:
        self._numbers[_Numbers.IS_IDLE] = 0
        self._numbers[_Numbers.RUNS] = 1

    def stop(self) -> None:
        """Give up what is being transcribed, and wait until that has ended."""
        self._numbers[_Numbers.RUNS] = 0
        self._wait(_Numbers.IS_IDLE)

    def close(self) -> None:
        self._open.close()

    def _wait(self, flag: int) -> None:
        import ray

        until_s = time.monotonic() + START_S
        while not self._numbers[flag]:
            if ray.wait([self._load], timeout=LOOK_S)[0]:
                ray.get(self._load)  # raises what ended it
            if time.monotonic() > until_s:
                self.close()
                raise SystemExit("the bulk load does not answer")


class _Numbers(IntEnum):
    DONE_S, READY, RUNS, IS_IDLE = range(4)


def _run_load(path: str, files: list[Path], at_once: int) -> None:
    run_when_idle()  # as `Transcriber` does
    asyncio.run(_load(np.memmap(path, np.float64, "r+"), files, at_once))


async def _load(numbers: NDArray[np.float64], files: list[Path], at_once: int) -> None:
    async with unlimited_engine() as engine:
        numbers[_Numbers.READY] = 1
        while True:
            while not numbers[_Numbers.RUNS]:  # noqa: ASYNC110 - another process sets it
                await asyncio.sleep(LOOK_S)
            workers = [
                asyncio.create_task(_worker(engine, files[i:] + files[:i], numbers))
                for i in range(at_once)
            ]
            while numbers[_Numbers.RUNS]:  # noqa: ASYNC110 - another process sets it
                await asyncio.sleep(LOOK_S)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            numbers[_Numbers.IS_IDLE] = 1


async def _worker(engine: BulkEngine, files: list[Path], numbers: NDArray[np.float64]) -> None:
    params, before_s = engine.params(FORM), 0.0

    def note(now_s: float, _: float) -> None:
        nonlocal before_s
        numbers[_Numbers.DONE_S] += max(0.0, now_s - before_s)
        before_s = now_s

    while True:
        for file in files:
            before_s = 0.0
            await engine.transcribe(file, params, on_progress=note)


def hours_per_hour(audio_s: float, since: float) -> float:
    """Hours of audio in an hour, of work that began at `since` of `perf_counter`."""
    return audio_s / (time.perf_counter() - since)
