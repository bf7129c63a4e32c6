"""What it is worth that the same audio is encoded once, and what that costs audio that is new.

    python -m benchmark.serving.reuse [--shape base] [--rounds 5] [--files 8]

The whole way of a request in this process, from the file to the text, without HTTP and Ray; three
times, with the same weights (random, in a published shape): with `encoder.cache`, and twice
without. In each round the one that keeps KV gets new 5 s clips one at a time, and then the same
ones again: a miss and a hit of each. A hit cannot be faster than its miss less the encoder's batch,
which is the ceiling. Then all take new clips, 8 in flight, by turns: what differs between the two
without a cache is the noise in which the third should lie. Their CPU time is told beside their
speed: other work on the machine moves it less. What is added for each window, the digest of its
samples, is timed first. Prints a table and one JSON line last.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.shared.clips import UniqueFiles
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.demo_speech import CACHE
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info
from benchmark.shared.rounds import median_ratio
from benchmark.shared.shapes import SHAPES
from cluster.messages import SAMPLE_RATE
from cluster.serve.in_process import local_transcriber
from cluster.settings_sources import load_settings
from router.api.params import TranscriptionParams
from router.audio_key import audio_key
from router.interface import RequestContext, TranscriptionResult
from router.transcriber import RequestTranscriber

IN_FLIGHT = 8
PATIENCE_S = 600.0
DIGESTS = 200  # timed of each length
PARAMS = TranscriptionParams(model="forced", language="en", fallback=False)


@dataclass(slots=True)
class Turns:
    """One system's turns with new files, a value a round."""

    rate: list[float] = field(default_factory=list)  # files/s
    cpu_ms: list[float] = field(default_factory=list)  # of a file, without the audio workers


@dataclass(slots=True)
class Found:
    """All rounds: ms of each request, and the turns."""

    miss_ms: list[float] = field(default_factory=list)
    hit_ms: list[float] = field(default_factory=list)
    ceiling_ms: list[float] = field(default_factory=list)
    kept: Turns = field(default_factory=Turns)
    off: Turns = field(default_factory=Turns)
    off_again: Turns = field(default_factory=Turns)


@dataclass(frozen=True, slots=True)
class Heard:
    """One file's answer and how long it took."""

    result: TranscriptionResult
    wall_ms: float


def digest_ms(seconds: float) -> float:
    """Median time to name a window of so many seconds."""
    pcm = np.random.default_rng(0).integers(-2000, 2000, int(seconds * SAMPLE_RATE), dtype=np.int16)
    taken = []
    for _ in range(DIGESTS):
        began = time.perf_counter()
        audio_key(pcm, None, b"o" * 32)
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


async def hear(
    transcriber: RequestTranscriber, files: Sequence[Path], in_flight: int
) -> list[Heard]:
    slots = asyncio.Semaphore(in_flight)

    async def one(file: Path) -> Heard:
        async with slots:
            began = time.perf_counter()
            context = RequestContext.unlimited(file.name, PATIENCE_S)
            result = await transcriber.transcribe(file, PARAMS, context)
            return Heard(result, 1000 * (time.perf_counter() - began))

    return await asyncio.gather(*map(one, files))


async def compare_latency(keeping: RequestTranscriber, files: list[Path], found: Found) -> None:
    """Misses, then hits of the same files, which must give the same texts."""
    misses, hits = [await hear(keeping, files, 1) for _ in range(2)]
    for miss, hit in zip(misses, hits, strict=True):
        if hit.result.timings.cache_misses or not miss.result.timings.cache_misses:
            raise SystemExit("a window was encoded again, or not at all")
        if miss.result.transcript.text != hit.result.transcript.text:
            raise SystemExit("a hit gave another text")
        found.miss_ms.append(miss.wall_ms)
        found.hit_ms.append(hit.wall_ms)
        found.ceiling_ms.append(miss.wall_ms - 1000 * miss.result.timings.encode_s)


async def take_turn(transcriber: RequestTranscriber, files: list[Path], turns: Turns) -> None:
    began, cpu_began = time.perf_counter(), time.process_time()
    await hear(transcriber, files, IN_FLIGHT)
    turns.rate.append(len(files) / (time.perf_counter() - began))
    turns.cpu_ms.append(1000 * (time.process_time() - cpu_began) / len(files))


async def measure(audio: UniqueFiles, checkpoint: Path, n_rounds: int, n_files: int) -> Found:
    found = Found()
    async with AsyncExitStack() as stack:
        systems = []
        for cache in (False, True, False):
            flags = {
                "model": str(checkpoint),
                "encoder": {"cache": cache},
                "router": {"audio_workers": 1},
            }
            settings = load_settings(None, flags, environ={})
            systems.append(await stack.enter_async_context(local_transcriber(settings)))
            await hear(systems[-1], audio.take(IN_FLIGHT), IN_FLIGHT)  # warm-up
        encoding, keeping, encoding_too = systems
        for number in range(n_rounds):
            await compare_latency(keeping, audio.take(n_files), found)
            order = [(encoding, found.off), (keeping, found.kept)]
            order.append((encoding_too, found.off_again))
            for transcriber, turns in order if number % 2 else order[::-1]:
                await take_turn(transcriber, audio.take(2 * n_files), turns)
    return found


def report(found: Found) -> dict[str, float]:
    noise = [a / b for a, b in zip(found.off_again.cpu_ms, found.off.cpu_ms, strict=True)]
    gains = [m / h for m, h in zip(found.miss_ms, found.hit_ms, strict=True)]
    rows = {
        "hit_ceiling_ms": statistics.median(found.ceiling_ms),
        "hit_ms": statistics.median(found.hit_ms),
        "miss_ms": statistics.median(found.miss_ms),
        "miss_over_hit": statistics.median(gains),
        "new_files_per_s": statistics.median(found.kept.rate),
        "new_files_per_s_without_cache": statistics.median(found.off.rate),
        "rate_with_over_without": median_ratio(found.kept.rate, found.off.rate),
        "rate_without_over_without": median_ratio(found.off_again.rate, found.off.rate),
        "cpu_ms_with_cache": statistics.median(found.kept.cpu_ms),
        "cpu_ms_without_cache": statistics.median(found.off.cpu_ms),
        "cpu_with_over_without": median_ratio(found.kept.cpu_ms, found.off.cpu_ms),
        "cpu_without_over_without": statistics.median(noise),
        "cpu_without_over_without_least": min(noise),
        "cpu_without_over_without_most": max(noise),
    }
    return {name: round(value, 3) for name, value in rows.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=8, help="in a round, one at a time")
    parser.add_argument("--tokens", type=int, default=18, help="of each window")
    parser.add_argument("--cache", type=Path, default=CACHE, help="checkpoints")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {f"digest_ms_{s}_s": round(digest_ms(s), 3) for s in (5, 30)}
    weights = args.cache / f"{args.shape}-{args.tokens}-tokens"
    checkpoint = forced_checkpoint(weights, SHAPES[args.shape], args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        audio = UniqueFiles(Path(folder), "short")
        found = asyncio.run(measure(audio, checkpoint, args.rounds, args.files))
    figures |= report(found)
    table = Table(title=f"whisper-{args.shape}, 5 s clips of {args.tokens} tokens")
    for column in ("", "median"):
        table.add_column(column)
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    Console(width=120).print(table)
    print_result("reuse", {**cpu_info(), "shape": args.shape, "rounds": args.rounds, **figures})


if __name__ == "__main__":
    main()
