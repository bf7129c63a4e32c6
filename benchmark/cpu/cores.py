"""How much the cores of this machine do together of what one does alone, by kind of work.

    python -m benchmark.cpu.cores [--seconds 0.5] [--rounds 7]

What a system calls cores may be threads of one, which share its units and its caches, and all of
them share the memory. So work beside other work is slower even where each has "a core": the share
of its speed that a core keeps while all others are busy is the ceiling of every claim that a
request does not feel what runs beside it, and of what a second thread can win.

A process pinned to each core; by turns the first one alone and all of them, on the same work.
Prints a table, one JSON line last.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions

IN_CACHE, WIDE = 256, 2048  # rows and columns
MEMORY_FLOATS = 32 << 20  # 128 MB, more than most share of a cache

Work = Callable[[], object]


def make_works() -> dict[str, Work]:
    """Each call takes from some tenths of a millisecond to some milliseconds."""
    small = torch.randn(IN_CACHE, IN_CACHE)
    narrow, wide = torch.randn(IN_CACHE, 512), torch.randn(WIDE, 512)
    half_narrow, half_wide = narrow.bfloat16(), wide.bfloat16()
    much = torch.randn(MEMORY_FLOATS)
    numbers = list(range(2000))
    return {
        "products of float32 in the first caches": lambda: small @ small,
        "an encoder's product in float32": lambda: narrow @ wide.t(),
        "an encoder's product in bfloat16": lambda: half_narrow @ half_wide.t(),
        "reading memory": lambda: much.sum(),
        "Python": lambda: sum(number * number for number in numbers),
    }


def serve(core: int, connection: Connection) -> None:
    """Do what is asked for so many seconds, and answer how many times a second it was done."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    works = make_works()
    with torch.inference_mode():
        for work in works.values():
            work()
        connection.send(list(works))
        while (asked := connection.recv()) is not None:
            name, seconds = asked
            work, done = works[name], 0
            began = time.perf_counter()
            while (spent := time.perf_counter() - began) < seconds:
                work()
                done += 1
            connection.send(done / spent)


def measure(connections: list[Connection], name: str, seconds: float) -> list[float]:
    """Times a second of each core, all at once."""
    for connection in connections:
        connection.send((name, seconds))
    return [connection.recv() for connection in connections]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system pins no process to a core")
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for core in cores:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(core, theirs), daemon=True))
        processes[-1].start()
        connections.append(ours)
    names: list[str] = [connection.recv() for connection in connections].pop()
    found: dict[str, Any] = {}
    for name in names:
        alone, together = [], []
        for _ in range(args.rounds):
            alone += measure(connections[:1], name, args.seconds)
            together.append(measure(connections, name, args.seconds))
        one = statistics.median(alone)
        found[name] = {
            "per_s_alone": one,
            "all_over_one": statistics.median(sum(each) for each in together) / one,
            "share_kept": statistics.median(each[0] for each in together) / one,
        }
    for connection, process in zip(connections, processes, strict=True):
        connection.send(None)
        process.join()
    table = Table("work", "one core alone, times a second", "all over one", "speed that one keeps")
    for name, row in found.items():
        kept = f"{100 * row['share_kept']:.0f} %"
        table.add_row(name, f"{row['per_s_alone']:.0f}", f"{row['all_over_one']:.2f}", kept)
    Console(width=110).print(table)
    print_result("cores", {**cpu_info(), **versions("torch"), "works": found})


if __name__ == "__main__":
    main()
