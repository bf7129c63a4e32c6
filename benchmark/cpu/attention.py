"""The encoder's attention on one core: by tiles, by products with a softmax between, by torch.

    python -m benchmark.cpu.attention [--queries 250] [--keys 1500] [--heads 8] [--rounds 60]

One unit of a window in bfloat16, by each way in turn; the fastest and the median of all rounds.
The ceiling is the time of the same multiplications in one large product. Tiles need a CPU with AMX.
Prints a table, one JSON line last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from cluster.jit.tile_registers import has_bfloat16_tiles

HEAD_DIM = 64
LARGE = 2048  # rows and columns of the ceiling's product


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--queries", type=int, default=250)
    parser.add_argument("--keys", type=int, default=1500)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        ways = make_ways(args.heads, args.queries, args.keys)
        times_s: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()  # not counted
        for _ in range(args.rounds):
            for name, way in ways.items():
                begun = time.perf_counter()
                way()
                times_s[name].append(time.perf_counter() - begun)
    share = 2 * args.heads * args.queries * args.keys * HEAD_DIM / LARGE**3
    found = {
        name: {"least_ms": 1e3 * min(each), "median_ms": 1e3 * statistics.median(each)}
        for name, each in times_s.items()
    }
    found["ceiling"] = {name: share * value for name, value in found["ceiling"].items()}
    table = Table("way", "least, ms", "median, ms")
    for name, row in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console(width=80).print(table)
    flags = {"queries": args.queries, "keys": args.keys, "heads": args.heads}
    print_result("attention", {**cpu_info(), **versions("torch"), **flags, "ways": found})


def make_ways(n_head: int, n: int, n_keys: int) -> dict[str, Callable[[], object]]:
    """Each way by its name; the ceiling's product is `LARGE` in every dimension."""
    from encoder_worker.cpu.attention import Attention, ProductAttention, TileAttention
    from encoder_worker.cpu.team_kernels import build

    large = torch.randn(LARGE, LARGE).bfloat16()
    q, k, v = (torch.randn(n_head, rows, HEAD_DIM).bfloat16() for rows in (n, n_keys, n_keys))

    def ours(attend: Attention) -> Callable[[], object]:
        room = (0, 0, 0, -n_keys % attend.key_multiple)
        keys, values = F.pad(k, room), F.pad(v, room)
        if attend.values_by_dim:
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        return partial(attend, q, keys, values, n_keys)

    ways: dict[str, Callable[[], object]] = {"ceiling": partial(torch.mm, large, large)}
    if has_bfloat16_tiles():
        ways["tiles"] = ours(TileAttention(build(np.uint16, tiles=True)))
    ways["products"] = ours(ProductAttention(build(np.uint16)))
    torchs = (x[None] for x in (q, k, v))
    ways["torch"] = partial(F.scaled_dot_product_attention, *torchs)
    return ways


if __name__ == "__main__":
    main()
