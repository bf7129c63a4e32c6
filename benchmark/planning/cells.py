"""Clusters of thousands of workers as cells: one is simulated, the others are drawn from it.

    python -m benchmark.planning.cells [--workers 100 1000 10000] [--rate 1000] [--seconds 300]
        [--encoders 76] [--decoders 24] [--routers 12] [--profile two-cores] [--rack 150]

Cells share nothing, so a balancer above them makes each an independent draw of the same random
process. One cell runs in the simulator, with the server's own code for every decision. Of each
other cell every block of `BLOCK_S` has a Poisson number of requests, whose outcomes are drawn with
replacement from those that came to the exact cell in the same block. So cells differ by chance in
what comes, and not in how a queue that builds up in one of them lasts into its next block.
--rack: the second in which every cell loses 5 % of the workers of both roles at once.

Prints a row for each size, how long the exact cell took, and one JSON line last.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from cluster.planning.profile import load_profile
from cluster.planning.report import Outcome, summary
from cluster.planning.scenario import make_scenario
from cluster.planning.simulate import simulate

BLOCK_S = 1.0
RACK_SHARE = 0.05
PERCENTILES = (50, 95, 99)
LATE = 2.0  # times the usual p95: a second above it counts as disturbed
TOLD_EVERY_S = 10.0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one cell. blocks: latencies in seconds by block; infinite for one that failed."""

    blocks: list[Floats]

    @classmethod
    def of(cls, outcome: Outcome) -> Cell:
        """The exact one."""
        n_blocks = round(outcome.scenario.load.seconds / BLOCK_S)
        rows: list[list[float]] = [[] for _ in range(n_blocks)]
        for answers in outcome.records.answers.values():
            for at_s, _, latency_s in answers.rows():
                rows[min(n_blocks - 1, int(at_s / BLOCK_S))].append(latency_s)
        return cls([np.array(row) for row in rows])

    def drawn(self, chance: np.random.Generator) -> Cell:
        """Another cell like this one."""
        return Cell([chance.choice(one, chance.poisson(len(one))) for one in self.blocks])


def row_of(cells: list[Cell], rate: float) -> dict[str, Any]:
    """What came of all cells together."""
    n_blocks = len(cells[0].blocks)
    by_block = [np.concatenate([cell.blocks[n] for cell in cells]) for n in range(n_blocks)]
    every = np.concatenate(by_block)
    p95s = np.array([np.percentile(one, 95, method="nearest") for one in by_block if len(one)])
    of_cells = [np.percentile(np.concatenate(one.blocks), 95, method="nearest") for one in cells]
    return {
        "cells": len(cells),
        "rate_per_s": rate * len(cells),
        "requests": len(every),
        "failed": int(np.isinf(every).sum()),
        **{
            f"p{n}_s": round(float(np.percentile(every, n, method="nearest")), 3)
            for n in PERCENTILES
        },
        "p95_of_cells_s": [round(float(min(of_cells)), 3), round(float(max(of_cells)), 3)],
        "worst_second_p95_s": round(float(p95s.max()), 3),
        "disturbed_s": int((p95s > LATE * np.median(p95s)).sum() * BLOCK_S),
    }


def exact(args: argparse.Namespace, console: Console) -> tuple[Outcome, float, float]:
    """The cell that is simulated, and how long that took, by the clock and of the processor."""
    scenario = make_scenario(
        {
            "profile": args.profile,
            "cluster": {
                "encoders": args.encoders,
                "decoders": args.decoders,
                "routers": args.routers,
            },
            "load": {"rate_per_s": args.rate, "seconds": args.seconds},
            "racks": [] if args.rack is None else [{"at_s": args.rack, "share": RACK_SHARE}],
            "seed": args.seed,
        }
    )
    began_s = told_s = time.perf_counter()

    def tell(at_s: float, n_requests: int) -> None:
        nonlocal told_s
        if time.perf_counter() - told_s >= TOLD_EVERY_S:
            told_s = time.perf_counter()
            console.print(f"second {at_s:.0f} of {args.seconds:g}, {n_requests} requests")

    before_s = time.process_time()
    outcome = simulate(scenario, load_profile(args.profile), tell)
    return outcome, time.perf_counter() - began_s, time.process_time() - before_s


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("workers", "cells", "rate_per_s", "requests", "failed", "p50_s", "p95_s", "p99_s")
    more = ("p95_of_cells_s", "worst_second_p95_s", "disturbed_s", "draw_s")
    table = Table(title="simulated: one cell exactly, the others drawn from it")
    for column in (*columns, *more):
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in (*columns, *more)))
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--encoders", type=int, default=76, help="of a cell")
    parser.add_argument("--decoders", type=int, default=24, help="of a cell")
    parser.add_argument("--routers", type=int, default=12, help="of a cell")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second of a cell")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--profile", default="two-cores")
    parser.add_argument("--rack", type=float, help="second of the loss of 5 %% of all workers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=150)
    load_before = psutil.getloadavg()
    outcome, took_s, cpu_s = exact(args, console)
    told = summary(outcome, cpu_s)
    cell, chance = Cell.of(outcome), np.random.default_rng(args.seed)
    rows = []
    for workers in args.workers:
        began_s = time.perf_counter()
        n_cells = max(1, round(workers / (args.encoders + args.decoders)))
        row = row_of([cell, *(cell.drawn(chance) for _ in range(n_cells - 1))], args.rate)
        draw_s = round(time.perf_counter() - began_s, 1)
        rows.append({"workers": workers, **row, "draw_s": draw_s})
    print_rows(rows, console)
    busy, retries = told["utilisation"], told["retries"]
    console.print(
        f"the exact cell: {told['requests']} requests of {args.seconds:g} s in {took_s:.0f} s "
        f"({cpu_s:.0f} s of the processor), "
        f"{told['us_per_request']} us each; encoders {busy['encoder_busy']:.0%} busy, decoders "
        f"{busy['decoder_busy']:.0%}; windows tried again: {retries or 'none'}"
    )
    about = {"machine": cpu_info(), "versions": versions("ray"), "load_before": load_before}
    took = {"took_s": round(took_s, 1), "cpu_s": round(cpu_s, 1)}
    exact_cell = {**took, "figures": told | {"decisions": [], "moments": []}}
    asked = {name: value for name, value in vars(args).items() if name != "json"}
    print_result("planning.cells", {**about, "asked": asked, "exact": exact_cell, "rows": rows})


if __name__ == "__main__":
    main()
