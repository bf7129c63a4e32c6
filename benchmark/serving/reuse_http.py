"""What a client of the server wins where the same audio was encoded before, over HTTP.

    python -m benchmark.serving.reuse_http [--shape base] [--rounds 5] [--context trimmed]

Starts `splitscribe serve` on random weights in a published shape. Each round sends new 5 s clips,
one at a time, and then the same ones again: a miss and a hit of each, as the header
`x-splitscribe-cache` must say, with the same text. A hit cannot be faster than its miss less the
encoder's part, which `server-timing` tells: that is the ceiling. Then new clips eight at a time,
and those again. Prints a table and one JSON line last.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmark.shared.clips import UniqueFiles
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.demo_speech import CACHE
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info
from benchmark.shared.rounds import median_ratio
from benchmark.shared.server import serving
from benchmark.shared.shapes import SHAPES
from cluster.demo.showcase import parse_server_timing

IN_FLIGHT = 8
WARM_UP = 4  # files
FORM = {"model": "whisper-1", "language": "en", "fallback": "false", "response_format": "text"}


@dataclass(frozen=True, slots=True)
class Answered:
    """A request's text, what the header says of the cache, and milliseconds."""

    text: str
    cache: str
    wall_ms: float
    encode_ms: float


@dataclass(slots=True)
class Found:
    """All rounds: ms of each request that was alone, and files/s of those that were not."""

    miss_ms: list[float] = field(default_factory=list)
    hit_ms: list[float] = field(default_factory=list)
    ceiling_ms: list[float] = field(default_factory=list)
    miss_rate: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)


def ask(client: httpx.Client, file: Path) -> Answered:
    content, began = file.read_bytes(), time.perf_counter()
    answer = client.post("/v1/audio/transcriptions", data=FORM, files={"file": ("a.wav", content)})
    wall_ms = 1000 * (time.perf_counter() - began)
    answer.raise_for_status()
    stages = parse_server_timing(answer.headers["server-timing"])
    cache = answer.headers.get("x-splitscribe-cache", "").partition(";")[0]
    return Answered(answer.text, cache, wall_ms, stages["encode"])


def send(client: httpx.Client, files: Sequence[Path], cache: str, in_flight: int) -> list[Answered]:
    """Raises SystemExit where the cache is not what was expected."""
    with ThreadPoolExecutor(in_flight) as senders:
        answers = list(senders.map(lambda file: ask(client, file), files))
    if wrong := [one.cache for one in answers if one.cache != cache]:
        raise SystemExit(
            f"expected a {cache} of each file, the server says {wrong[0] or 'nothing'}"
        )
    return answers


def measure(url: str, audio: UniqueFiles, n_rounds: int, n_files: int) -> Found:
    found = Found()
    with httpx.Client(base_url=url, timeout=300.0) as client:
        send(client, audio.take(WARM_UP), "miss", 1)
        for _ in range(n_rounds):
            files = audio.take(n_files)
            misses, hits = (send(client, files, cache, 1) for cache in ("miss", "hit"))
            for miss, hit in zip(misses, hits, strict=True):
                if miss.text != hit.text:
                    raise SystemExit("a hit gave another text")
                found.miss_ms.append(miss.wall_ms)
                found.hit_ms.append(hit.wall_ms)
                found.ceiling_ms.append(miss.wall_ms - miss.encode_ms)
            files = audio.take(IN_FLIGHT)
            for cache, rates in (("miss", found.miss_rate), ("hit", found.hit_rate)):
                began = time.perf_counter()
                send(client, files, cache, IN_FLIGHT)
                rates.append(len(files) / (time.perf_counter() - began))
    return found


def report(found: Found) -> dict[str, float]:
    rows = {
        "hit_ceiling_ms": statistics.median(found.ceiling_ms),
        "hit_ms": statistics.median(found.hit_ms),
        "miss_ms": statistics.median(found.miss_ms),
        "miss_over_hit": median_ratio(found.miss_ms, found.hit_ms),
        "miss_over_ceiling": median_ratio(found.miss_ms, found.ceiling_ms),
        "misses_per_s": statistics.median(found.miss_rate),
        "hits_per_s": statistics.median(found.hit_rate),
        "hits_over_misses": median_ratio(found.hit_rate, found.miss_rate),
    }
    return {name: round(value, 3) for name, value in rows.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=8, help="in a round, one at a time")
    parser.add_argument("--tokens", type=int, default=18, help="of each window")
    parser.add_argument("--context", default="full", choices=("full", "trimmed"))
    parser.add_argument("--cache", type=Path, default=CACHE, help="checkpoints")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    weights = args.cache / f"{args.shape}-{args.tokens}-tokens"
    checkpoint = forced_checkpoint(weights, SHAPES[args.shape], args.tokens)
    environment = {"SPLITSCRIBE_ENCODER__CONTEXT": args.context}
    if args.context == "trimmed":
        environment |= {"SPLITSCRIBE_ENCODER__CONTEXT_SLACK": "64"}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(str(checkpoint), env=environment) as server,
    ):
        audio = UniqueFiles(Path(folder), "short")
        figures = report(measure(server.url, audio, args.rounds, args.files))
    title = f"whisper-{args.shape}, {args.context} contexts, 5 s clips of {args.tokens} tokens"
    table = Table("", "median", title=title)
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    Console(width=120).print(table)
    flags = {"shape": args.shape, "context": args.context, "rounds": args.rounds}
    print_result("reuse_http", {**cpu_info(), **flags, **figures})


if __name__ == "__main__":
    main()
