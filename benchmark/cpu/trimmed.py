"""How much sooner a CPU has encoded a short clip in a trimmed context than in 30 s.

    python -m benchmark.cpu.trimmed [--shape base] [--seconds 5] [--slack 64] [--rounds 15]

What an encoder worker does with one window, from its samples to the keys and values of
cross-attention in their pages, in this process: log-mel, encoder, projection. Weights are random,
in a published shape. Each round has the same clip once in the trimmed context and once in full in
each precision, in changing order. The ceiling is how many times fewer floating-point operations the
trimmed window has; attention counts by the square of the length, so it wins the most.
Prints a table, one JSON line last.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.flops import FRAMES, encoder_flops, projection_flops
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.rounds import median_ratio
from benchmark.shared.shapes import SHAPES
from cluster.jit.background import wait_for_builds
from cluster.kv.layout_for import kv_layout
from cluster.kv.pool import PagePool
from cluster.messages import FRAMES_PER_S, SAMPLE_RATE, Pcm
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import resolve_dtype, use_threads
from cluster.model.encoder_context import FULL, EncoderContext
from cluster.settings import DType
from encoder_worker.forward import WindowEncoder
from tests.support.checkpoints import ModelShape, make_checkpoint

KERNELS_S = 600.0  # to compile them, on cores that other processes have
PRECISIONS: tuple[DType, ...] = ("bfloat16", "int8", "float32")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=5.0, help="of the clip")
    parser.add_argument("--slack", type=int, default=64, help="positions behind the audio")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    use_threads(0)
    shape, n_frames = SHAPES[args.shape], round(args.seconds * FRAMES_PER_S)
    context = EncoderContext(args.slack, 30.0).positions_for(n_frames, FRAMES)
    if context == FULL:
        parser.error(f"{args.seconds:g} s and {args.slack} positions of slack take all positions")
    samples = np.random.default_rng(0).normal(0, 3000, round(args.seconds * SAMPLE_RATE))
    pcm = samples.astype(np.int16)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), shape)
        rows = measure(folder, pcm, context, args.rounds)
    ceiling = times_fewer_operations(shape, context)
    title = f"whisper-{args.shape}, {args.seconds:g} s, {context} positions beside all"
    columns = ["precision", "full, ms", "trimmed, ms", "times faster", "operations"]
    beside = [f"{part} beside {PRECISIONS[0]}" for part in ("full", "trimmed")]
    table = Table(*columns, *beside, title=title)
    for dtype, row in rows.items():
        figures = (row["full_ms"], row["trimmed_ms"], row["times_faster"], ceiling)
        figures += (row["full_beside_first"], row["trimmed_beside_first"])
        table.add_row(dtype, *(f"{figure:.2f}" for figure in figures))
    console = Console(width=110)
    console.print(f"{ceiling:.2f} times fewer operations in the trimmed window")
    console.print(table)
    kv = FRAMES / context
    console.print(f"KV of the window: {kv:.2f} times fewer bytes")
    flags = {"shape": args.shape, "seconds": args.seconds, "positions": context}
    figures_json: dict[str, Any] = {"times_fewer_operations": round(ceiling, 2), "rows": rows}
    found = {**flags, **figures_json, "times_fewer_kv_bytes": round(kv, 2)}
    print_result("trimmed", {**cpu_info(), **versions("torch"), **found})


class Precision:
    """An encoder and a page to write to."""

    def __init__(self, folder: str, dtype: DType) -> None:
        checkpoint = open_checkpoint(folder)
        computes_in = resolve_dtype(dtype, "cpu")
        self._pool = PagePool(kv_layout(checkpoint, dtype=computes_in), 1)
        self.encoder = WindowEncoder(checkpoint, computes_in, "cpu", int8=dtype == "int8")

    def time_ms(self, pcm: Pcm, positions: int) -> float:
        began = time.perf_counter()
        self.encoder([pcm], self._pool.tensor, [(0,)], context=positions).wait()
        return 1000 * (time.perf_counter() - began)


def measure(folder: str, pcm: Pcm, context: int, n_rounds: int) -> dict[str, dict[str, float]]:
    """By precision medians in ms, and of the ratios within rounds."""
    encoders = {dtype: Precision(folder, dtype) for dtype in PRECISIONS}
    wait_for_builds(KERNELS_S)
    cases = list(itertools.product(PRECISIONS, (FULL, context)))
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    try:
        for number in range(n_rounds + 2):  # the first two warm up
            for dtype, positions in cases if number % 2 else reversed(cases):
                took_ms = encoders[dtype].time_ms(pcm, positions)
                if number > 1:
                    taken[dtype, positions].append(took_ms)
    finally:
        for one in encoders.values():
            one.encoder.close()
    return {
        dtype: {
            "full_ms": round(statistics.median(taken[dtype, FULL]), 2),
            "trimmed_ms": round(statistics.median(taken[dtype, context]), 2),
            "times_faster": round(median_ratio(taken[dtype, FULL], taken[dtype, context]), 2),
            "full_beside_first": round(
                median_ratio(taken[PRECISIONS[0], FULL], taken[dtype, FULL]), 2
            ),
            "trimmed_beside_first": round(
                median_ratio(taken[PRECISIONS[0], context], taken[dtype, context]), 2
            ),
        }
        for dtype in PRECISIONS
    }


def times_fewer_operations(shape: ModelShape, context: int) -> float:
    """Of encoder and projection, in a window of `context` positions beside one of all."""
    full = encoder_flops(shape) + projection_flops(shape)
    return full / (encoder_flops(shape, context) + projection_flops(shape, context))


if __name__ == "__main__":
    main()
