"""What it is worth that the same audio is encoded once, and what that costs audio that is new.

    python -m benchmark.serving.reuse [--shape base] [--rounds 5] [--files 8]

One server with the same weights twice (random, in a published shape): with `encoder.cache`, and
without. In each round the model that keeps KV gets new 5 s clips one at a time, and then the same
ones again: a miss and a hit of each. A hit cannot be faster than its miss less the encoder's queue
and batch, which is the ceiling. Then both models take new clips, 8 in flight, by turns, the one
without a cache twice: what differs between its own two turns is the noise in which the other one
should lie. What is added for each window, the digest of its samples, is timed first. Prints
a table and one JSON line last.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.cpu.systems import FIELDS, Models, Splitscribe, our_server
from benchmark.shared.clips import UniqueFiles
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.demo_speech import CACHE
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info
from benchmark.shared.openai_client import Client, Outcome, Upload, send_all
from benchmark.shared.rounds import median_ratio
from benchmark.shared.shapes import SHAPES
from cluster.demo.showcase import parse_server_timing
from cluster.messages import SAMPLE_RATE
from router.audio_key import audio_key

IN_FLIGHT = 8
DIGESTS = 200  # timed of each length


@dataclass(slots=True)
class Found:
    """All rounds: ms of each request, and files/s of each round's turns."""

    miss_ms: list[float] = field(default_factory=list)
    hit_ms: list[float] = field(default_factory=list)
    ceiling_ms: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    off_again: list[float] = field(default_factory=list)


def models(checkpoint: Path) -> Models:
    """The same checkpoint with and without a cache, for `our_server`."""
    return {
        f"cache-{cache}".lower(): (
            f"cache {cache}",
            {"model": str(checkpoint), "encoder": {"cache": cache}},
        )
        for cache in (True, False)
    }


def digest_ms(seconds: float) -> float:
    """Median time to name a window of so many seconds."""
    pcm = np.random.default_rng(0).integers(-2000, 2000, int(seconds * SAMPLE_RATE), dtype=np.int16)
    taken = []
    for _ in range(DIGESTS):
        began = time.perf_counter()
        audio_key(pcm, None, b"o" * 32)
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def send(system: Splitscribe, files: Sequence[Path], in_flight: int) -> list[Outcome]:
    """Raises SystemExit when a request fails."""

    async def all_of_them() -> list[Outcome]:
        form = {"model": system.model, **FIELDS, "response_format": "json"}
        uploads = [Upload.of(file.read_bytes(), file.name, form) for file in files]
        async with Client(system.server.url) as client:
            return await send_all(client, uploads, in_flight)

    outcomes = asyncio.run(all_of_them())
    if failed := [outcome for outcome in outcomes if outcome.failure]:
        raise SystemExit(f"{system.name}: {failed[0].failure} {failed[0].error}")
    return outcomes


def compare_latency(system: Splitscribe, files: Sequence[Path], found: Found) -> None:
    """Misses, then hits of the same files, which must give the same texts."""
    misses, hits = (send(system, files, 1) for _ in range(2))
    for miss, hit in zip(misses, hits, strict=True):
        if miss.text != hit.text:
            raise SystemExit(f"a hit gave another text: {hit.text!r} instead of {miss.text!r}")
        stages = parse_server_timing(miss.server_timing)
        if parse_server_timing(hit.server_timing)["encode"]:
            raise SystemExit("a window that was sent again was encoded again")
        found.miss_ms.append(1000 * miss.latency)
        found.hit_ms.append(1000 * hit.latency)
        found.ceiling_ms.append(found.miss_ms[-1] - stages["encode"])


def rate(system: Splitscribe, files: Sequence[Path]) -> float:
    """Files/s."""
    began = time.perf_counter()
    send(system, files, IN_FLIGHT)
    return len(files) / (time.perf_counter() - began)


def measure(audio: UniqueFiles, checkpoint: Path, n_rounds: int, n_files: int) -> Found:
    found = Found()
    with our_server(models(checkpoint)) as (keeping, encoding):
        for system in (keeping, encoding):  # kernels are compiled beside the first requests
            send(system, audio.take(2 * IN_FLIGHT), IN_FLIGHT)
            send(system, audio.take(2), 1)
        for number in range(n_rounds):
            compare_latency(keeping, audio.take(n_files), found)
            turns = [(encoding, found.off), (keeping, found.kept), (encoding, found.off_again)]
            for system, rates in turns if number % 2 else turns[::-1]:
                rates.append(rate(system, audio.take(2 * n_files)))
    return found


def report(found: Found) -> dict[str, Any]:
    noise = [a / b for a, b in zip(found.off_again, found.off, strict=True)]
    rows = {
        "miss_ms": statistics.median(found.miss_ms),
        "hit_ms": statistics.median(found.hit_ms),
        "hit_ceiling_ms": statistics.median(found.ceiling_ms),
        "miss_over_hit": statistics.median(
            m / h for m, h in zip(found.miss_ms, found.hit_ms, strict=True)
        ),
        "new_files_per_s": statistics.median(found.kept),
        "new_files_per_s_without_cache": statistics.median([*found.off, *found.off_again]),
        "new_with_over_without": median_ratio(found.kept, found.off),
        "without_over_without": median_ratio(found.off_again, found.off),
        "without_over_without_least": min(noise),
        "without_over_without_most": max(noise),
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
    digests = {f"digest_ms_{seconds}_s": round(digest_ms(seconds), 3) for seconds in (5, 30)}
    weights = args.cache / f"{args.shape}-{args.tokens}-tokens"
    checkpoint = forced_checkpoint(weights, SHAPES[args.shape], args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        audio = UniqueFiles(Path(folder), "short")
        found = measure(audio, checkpoint, args.rounds, args.files)
    figures = {**digests, **report(found)}
    table = Table(title=f"whisper-{args.shape}, 5 s clips of {args.tokens} tokens")
    for column in ("", "median"):
        table.add_column(column)
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    Console(width=120).print(table)
    print_result("reuse", {**cpu_info(), "shape": args.shape, "rounds": args.rounds, **figures})


if __name__ == "__main__":
    main()
