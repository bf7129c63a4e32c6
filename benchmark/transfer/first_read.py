"""How much longer a decoder's first hand-off of a window takes than later ones, on one host.

    python -m benchmark.transfer.first_read [--shape large-v3] [--rounds 5]

Memory that nobody has written to is given by the system when a READ reaches it. So a decoder on a
CPU writes to the pages that it takes first before it says that it is ready
(`decoder_worker.warm_up`). Each round makes two decoders' pools, one as the system gives it and one
written to in that way, and hands the same window to each three times; encoder and decoder are two
processes, and pages hold whole windows. The ceiling is 1: the first as fast as later ones.
Prints a table and one JSON line last.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info
from benchmark.shared.rounds import median_ratio
from benchmark.transfer.kv_transfer import CONFIG, SHAPES, Encoder
from cluster.kv.importer import KVImporter
from cluster.kv.layout import KVLayout, window_bytes
from cluster.kv.wires.connect import make_wire

READS = 3  # of each pool; all but the first are "later"
WAYS = {"as the system gives it": False, "written to": True}


def main() -> None:
    parser = make_parser(__doc__)
    names = [name for name, _, _ in SHAPES]
    parser.add_argument("--shape", default="large-v3", choices=names)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    name, n_layer, n_head = SHAPES[names.index(args.shape)]
    layout = KVLayout(name, n_layer, n_head, 64, 1500, 1500, "bfloat16")
    encoder = Encoder()
    encoder.call("open", layout)
    taken: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    read_ms(encoder, layout, written=True)  # connects
    for number in range(args.rounds):
        for way in list(WAYS) if number % 2 else list(WAYS)[::-1]:
            taken[way].append(read_ms(encoder, layout, written=WAYS[way]))
    encoder.close()
    rows = {way: as_json(times) for way, times in taken.items()}
    title = f"{args.shape}, a window of {window_bytes(layout) / 1e6:.0f} MB, in ms"
    table = Table("the decoder's pool", "first", "later", "first / later", title=title)
    for way, row in rows.items():
        table.add_row(way, *(f"{row[key]:g}" for key in ("first_ms", "later_ms", "ratio")))
    Console(width=100).print(table)
    flags: dict[str, Any] = {"shape": args.shape, "rounds": args.rounds}
    print_result("first_read", {**cpu_info(), **flags, "pools": rows})


def read_ms(encoder: Encoder, layout: KVLayout, *, written: bool) -> list[float]:
    """Milliseconds of each of the first hand-offs into a new pool, from accept to release."""
    importer = KVImporter(layout, layout.pages_per_window, CONFIG, make_wire(CONFIG))
    try:
        if written:
            importer.pool.tensor.zero_()
        pages = importer.pool.allocate(layout.pages_per_window)
        assert pages is not None
        times = []
        for _ in range(READS):
            handle = encoder.call("publish")
            began = time.perf_counter()
            importer.accept(handle)
            importer.fetch(handle, pages).result()
            times.append(1000 * (time.perf_counter() - began))
        return times
    finally:
        importer.close()


def as_json(rounds: list[list[float]]) -> dict[str, float]:
    first = [times[0] for times in rounds]
    later = [statistics.median(times[1:]) for times in rounds]
    return {
        "first_ms": round(statistics.median(first), 2),
        "later_ms": round(statistics.median(later), 2),
        "ratio": round(median_ratio(first, later), 2),
    }


if __name__ == "__main__":
    main()
