"""What a cluster's own code costs as it grows: to ten thousand workers, without any of them.

    python -m benchmark.serving.scale [--parts choice fan_out control requests peers questions]
        [--file benchmark/results/NAME.json]

Each part runs the project's real code on one thread, at several sizes, and takes the least
processor time of some batches. A ceiling is the least that could do (a random choice, a sum over a
dict, a bare task). `peers` opens real NIXL agents in processes of their own; `questions` starts a
Ray of its own with one actor. Prints a table, how each cost grows, and one JSON line last.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from rich.console import Console

from benchmark.serving.scale.figures import Figure, show
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info

PARTS = ("choice", "fan_out", "control", "requests", "peers", "questions")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--file", type=Path, help="where the figures are kept too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    console = Console(stderr=True, width=130)
    figures: list[Figure] = []
    growth: dict[str, float] = {}
    for part in args.parts:
        found = importlib.import_module(f"benchmark.serving.scale.{part}").measure()
        growth |= show(console, found)
        figures += found
    rows = [figure.as_json() for figure in figures]
    print_result("scale", {"machine": cpu_info(), "growth": growth, "figures": rows}, args.file)


if __name__ == "__main__":
    main()
