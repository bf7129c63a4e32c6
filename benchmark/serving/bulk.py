"""How fast an archive goes: audio hours per hour of a folder, five ways, by turns.

    python -m benchmark.serving.bulk [--shape base] [--rounds 3] [--files 24] [--seconds 60]

- the pools: windows that were cut before, through encoders and decoders alone. The ceiling.
- bulk work: the same files from disk, read, cut and transcribed as windows of class `bulk`.
- `splitscribe batch`: the whole command, from its start to its end.
- a loop of HTTP requests, as many in flight as the command has files at once.
- faster-whisper's batched pipeline, file by file, with its own voice detector, where it is
  installed (`pip install faster-whisper`).

All have the same weights: those of the bundled model, or random ones in a published shape whose
windows all take the same number of tokens. All decode greedily in English, without trying again.
Encoders keep nothing of what they have encoded (`encoder.cache: false`), since the same files come
in each round. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.rivals.engines import RivalProcess, RivalSpec
from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.flops import SHAPES
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info, median_ratio, usable_cores, versions
from benchmark.shared.openai_client import Client, Upload, send_all
from benchmark.shared.server import SPLITSCRIBE, BenchServer, serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.cli.batch.run import joined_cluster
from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import RouterSettings
from cluster.demo.samples import SAMPLES, sample_path
from cluster.serve.bulk.engine import (
    BulkEngine,
    application_settings,
    engine_of_application,
    serve_pools,
)
from cluster.serve.model_parts import make_transcriber
from router.audio.pool import AudioPool
from router.audio.windows import Window
from router.interface import RequestContext
from router.transcriber import RequestTranscriber

POOLS, BULK, COMMAND, HTTP = "pools alone", "bulk work", "splitscribe batch", "HTTP loop"
START_S = 120.0
PATIENCE_S = 3600.0
FORM = (("model", "whisper-1"), ("language", "en"), ("temperature", "0"), ("fallback", "false"))
UNTRIED = [  # flags by which the command tries no window again, as FORM has it
    f"--{name}-threshold=None" for name in ("compression-ratio", "logprob", "no-speech")
]


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


@dataclass(frozen=True, slots=True)
class Bench:
    """What all ways share. audio_s: of all files."""

    server: BenchServer
    engine: BulkEngine
    pools: RequestTranscriber
    files: Sequence[Path]
    audio_s: float
    at_once: int

    async def run_pools(self) -> None:
        params = self.engine.params(FORM)
        await self._each(
            lambda file: self.pools.transcribe(
                file, params, RequestContext.unlimited(file.name, PATIENCE_S)
            )
        )

    async def run_bulk(self) -> None:
        params = self.engine.params(FORM)
        await self._each(lambda file: self.engine.transcribe(file, params, name=file.name))

    async def _each(self, transcribe: Callable[[Path], Awaitable[Any]]) -> None:
        slots = asyncio.Semaphore(self.at_once)

        async def one(file: Path) -> None:
            async with slots:
                await transcribe(file)

        await asyncio.gather(*map(one, self.files))

    async def run_command(self) -> None:
        folder = self.files[0].parent
        output = folder.parent / "texts"
        shutil.rmtree(output, ignore_errors=True)
        process = await asyncio.create_subprocess_exec(
            *(SPLITSCRIBE, "batch", str(folder), "-o", str(output), "-f", "json"),
            *("--address", self.server.ray_address(), "--files-at-once", str(self.at_once)),
            *("--language", "en", *UNTRIED),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"splitscribe batch ended with {process.returncode}:\n{told.decode()}")

    async def run_http(self) -> None:
        uploads = [Upload.of(file.read_bytes(), file.name, dict(FORM)) for file in self.files]
        async with Client(self.server.url) as client:
            outcomes = await send_all(client, uploads, self.at_once)
        if failed := [one for one in outcomes if one.failure]:
            raise SystemExit(f"a request failed: {failed[0].failure} {failed[0].error}")


async def measure(
    bench: Bench, rival: RivalProcess | None, rounds: int, chosen: Sequence[str]
) -> dict[str, list[float]]:
    """Hours of audio in an hour, a value a round, after one of each that does not count."""
    ways: dict[str, Callable[[], Any]] = {
        POOLS: bench.run_pools,
        BULK: bench.run_bulk,
        COMMAND: bench.run_command,
        HTTP: bench.run_http,
    }
    if rival is not None:
        ways[rival.name] = lambda: asyncio.to_thread(rival.run, bench.files, 1)
    ways = {name: run for name, run in ways.items() if not chosen or name in (POOLS, *chosen)}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            await run()
            if turn:
                speeds[name].append(bench.audio_s / (time.perf_counter() - began))
                print(f"round {turn}: {name}: {speeds[name][-1]:.1f}", flush=True)
    return speeds


async def run(
    args: argparse.Namespace, server: BenchServer, rival: RivalProcess | None, folder: Path
) -> tuple[dict[str, list[float]], int]:
    """Speeds, and how many windows the files have."""
    talks = folder / "talks"
    talks.mkdir()
    files = write_talks(talks, args.files, args.seconds)
    settings, _ = await application_settings()
    ((name, own),) = settings.by_model().items()
    pools = await serve_pools(settings)
    audio = await CutAudio.of(files, settings.router)
    as_pool: Any = audio  # as far as a transcriber of windows needs it
    checkpoint = open_checkpoint(own.model, weights=False)
    alone = make_transcriber(own, checkpoint, as_pool, *pools[name], reuses_kv=False)
    async with engine_of_application() as engine:
        bench = Bench(server, engine, alone, files, args.files * args.seconds, args.at_once)
        return await measure(bench, rival, args.rounds, args.ways), audio.n_windows


def table_of(speeds: dict[str, list[float]]) -> Table:
    table = Table("way", "hours per hour", "least", "most", "of the pools' own", title="Archives")
    for name, values in speeds.items():
        figures = (statistics.median(values), min(values), max(values))
        share = f"{median_ratio(values, speeds[POOLS]):.3f}"
        table.add_row(name, *(f"{figure:.1f}" for figure in figures), share)
    return table


def make_rival(args: argparse.Namespace, checkpoint: Path) -> RivalProcess | None:
    """None where faster-whisper is not installed."""
    if importlib.util.find_spec("faster_whisper") is None:
        print("faster-whisper is not installed: its row is left out", flush=True)
        return None
    spec = RivalSpec("faster-whisper", args.rival_dtype, "long", threads=usable_cores())
    return RivalProcess(spec, checkpoint)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights; default: the bundled ones")
    parser.add_argument("--tokens", type=int, default=60, help="of a window of random weights")
    parser.add_argument("--dtype", default="auto", help="of the server")
    parser.add_argument("--rival-dtype", default="int8", help="of faster-whisper")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each file")
    ours = (BULK, COMMAND, HTTP)
    parser.add_argument("--ways", nargs="*", choices=ours, help="beside the pools; default: all")
    parser.add_argument("--at-once", type=int, default=8, help="files, or requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = folder / "weights"
        if args.shape:
            forced_checkpoint(checkpoint, SHAPES[args.shape], args.tokens)
        else:
            shutil.copytree(open_checkpoint("demo", weights=False).path, checkpoint)
        rival = None if args.ways else make_rival(args, checkpoint)
        flags = (str(checkpoint), "--dtype", args.dtype, "--served-model-name", "whisper-1")
        env = {"SPLITSCRIBE_ENCODER__CACHE": "false", "SPLITSCRIBE_LOG_LEVEL": "WARNING"}
        try:
            with serving(*flags, env=env) as server, joined_cluster(server.ray_address()):
                speeds, n_windows = asyncio.run(run(args, server, rival, folder))
        finally:
            if rival is not None:
                rival.close()
    Console(width=110).print(table_of(speeds))
    overhead = 1 - median_ratio(speeds[BULK], speeds[POOLS]) if BULK in speeds else None
    if overhead is not None:
        print(f"bulk work takes {100 * overhead:.1f} % off the pools' own speed")
    told = {**vars(args), "windows": n_windows, "hours_per_hour": speeds, "overhead": overhead}
    print_result("bulk", {**cpu_info(), **versions("torch", "faster-whisper"), **told})


if __name__ == "__main__":
    main()
