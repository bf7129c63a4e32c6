"""Should encoder and decoder have cores of their own, or may each take every core?

    python -m benchmark.cpu.core_split [--shape base] [--rounds 5] [--files 24]

One server with the same weights (random, in a published shape) under several settings of the
workers' threads; in each round all take the same files in random order, one at a time and 8 in
flight, and only one works. A ratio is taken within a round: to the even split of the cores, in
which each role has its own half. Needs two cores or more. Prints a table, one JSON line last.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmark.cpu.report import IN_FLIGHT
from benchmark.cpu.systems import Models, Splitscribe, our_server
from benchmark.shared.clips import UniqueFiles
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.demo_speech import CACHE
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info, usable_cores
from benchmark.shared.rounds import median_ratio
from benchmark.shared.shapes import SHAPES

SPLIT = "each its half"


def shares(n_cores: int) -> dict[str, tuple[int, int]]:
    """Threads of encoder and decoder, by a name; 0 is the default of each."""
    half = max(1, n_cores // 2)
    return {
        SPLIT: (half, n_cores - half or 1),
        "defaults: every core for each": (0, 0),
        "encoder every core, decoder half": (n_cores, half),
    }


def models(checkpoint: Path) -> Models:
    """The same checkpoint once for each way to share the cores, for `our_server`."""
    return {
        f"share-{number}": (
            name,
            {
                "model": str(checkpoint),
                "encoder": {"threads": encoder},
                "decoder": {"threads": decoder},
            },
        )
        for number, (name, (encoder, decoder)) in enumerate(shares(usable_cores()).items())
    }


def measure(
    systems: Sequence[Splitscribe], audio: UniqueFiles, n_files: int, n_rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Files/s of each round, by name and files in flight."""
    rates: dict[tuple[str, int], list[float]] = {}
    order = list(systems)
    for system in order:  # warm-up: kernels are compiled beside the first requests
        system.run(audio.take(n_files), max(IN_FLIGHT))
        system.run(audio.take(4), 1)
    for number in range(n_rounds):
        random.Random(number).shuffle(order)
        for in_flight in IN_FLIGHT:
            n = n_files if in_flight > 1 else max(4, n_files // 3)
            files = audio.take(n)
            for system in order:
                began = time.perf_counter()
                system.run(files, in_flight)
                rate = n / (time.perf_counter() - began)
                rates.setdefault((system.name, in_flight), []).append(rate)
    return rates


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=24, help="in a round, 8 in flight")
    parser.add_argument("--tokens", type=int, default=18, help="of each window")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    weights = args.cache / f"{args.shape}-{args.tokens}-tokens"
    checkpoint = forced_checkpoint(weights, SHAPES[args.shape], args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        audio = UniqueFiles(Path(folder), "short")
        with our_server(models(checkpoint)) as systems:
            rates = measure(systems, audio, args.files, args.rounds)
    table = Table(title=f"whisper-{args.shape}, 5 s clips of {args.tokens} tokens, files/s")
    for column in ("threads", "in flight", "files/s", "of the split"):
        table.add_column(column)
    rows = []
    for (name, in_flight), measured in rates.items():
        ratio = median_ratio(measured, rates[SPLIT, in_flight])
        rate = statistics.median(measured)
        table.add_row(name, str(in_flight), f"{rate:.2f}", f"{ratio:.2f}")
        rows.append(
            {
                "threads": name,
                "in_flight": in_flight,
                "files_per_s": round(rate, 3),
                "of_split": round(ratio, 3),
            }
        )
    Console(width=120).print(table)
    print_result("core_split", {**cpu_info(), "rows": rows})


if __name__ == "__main__":
    main()
