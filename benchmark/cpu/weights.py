"""What each role's worker holds of a model on a CPU, beside its pools, as a share of its weights.

Random weights in the shape of a published model are written as bfloat16, and each role loads them
in a process of its own, compiles or loads its kernels and computes one window. The limit is 1: the
weights once. What Python and torch themselves take is told apart.

    python -m benchmark.cpu.weights [--shape large-v3] [--layers 16]

Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.shapes import SHAPES
from tests.support.checkpoints import make_checkpoint


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="large-v3", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="of either role; default: as published")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "int8"))
    parser.add_argument("--role", choices=("encoder", "decoder"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        print(json.dumps(held(args.role, args.folder, args.dtype)))
        return
    shape = SHAPES[args.shape]
    if args.layers:
        shape = replace(shape, encoder_layers=args.layers, decoder_layers=args.layers)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), shape, dtype="bfloat16")
        roles = {role: _in_own_process(role, folder, args.dtype) for role in ("encoder", "decoder")}
    table = Table("role", "weights, MB", "held beside pools, MB", "of the weights", "before, MB")
    for role, found in roles.items():
        figures = (found["weights_mb"], found["held_mb"], found["share"], found["before_mb"])
        table.add_row(role, *(f"{figure:g}" for figure in figures))
    Console(width=100).print(table)
    flags = {"shape": args.shape, "layers": args.layers, "dtype": args.dtype}
    print_result("weights", {**cpu_info(), **versions("torch"), **flags, "roles": roles})


def held(role: str, folder: str, dtype: str) -> dict[str, float]:
    """Load a role in this process. Its weights count as `dtype` has them, 2 bytes for int8."""
    from cluster.jit.background import BUILDS_S
    from cluster.kv.payloads import make_exporters, make_handoff_importer
    from cluster.model.checkpoint import open_checkpoint
    from cluster.model.dims import cross_kv_shapes, decoder_shapes, encoder_shapes
    from cluster.serve.replicas.replica_setup import give_memory_back
    from cluster.settings_sources import load_settings
    from decoder_worker.engine import DecoderEngine
    from encoder_worker.engine import EncoderEngine

    one = {"device": "cpu", "dtype": dtype}
    flags: dict[str, Any] = {"model": folder, "transport": "memory", "cluster_key": "00" * 32}
    pools = {"encoder": {**one, "export_windows": 1}, "decoder": {**one, "kv_windows": 1}}
    settings = load_settings(None, {**flags, **pools}, environ={})
    checkpoint = open_checkpoint(folder)
    dims = checkpoint.dims
    if role == "encoder":
        shapes = encoder_shapes(dims) | cross_kv_shapes(dims)
    else:
        shapes = decoder_shapes(dims)
    n_numbers = sum(math.prod(shape) for shape in shapes.values())
    before_mb = anonymous_mb()
    if role == "encoder":
        exporters = make_exporters(checkpoint, settings, "cpu", role)
        engine: Any = EncoderEngine(checkpoint, exporters[0], settings.encoder, kernels_s=BUILDS_S)
        pool_mb = exporters[0].pool.n_bytes / 1e6
    else:
        importer = make_handoff_importer(checkpoint, settings, "cpu", role)
        engine = DecoderEngine(checkpoint, importer, settings.decoder, kernels_s=BUILDS_S)
        pool_mb = importer.pool.n_bytes / 1e6
    give_memory_back()
    held_mb = anonymous_mb() - before_mb - pool_mb
    engine.close()
    weights_mb = n_numbers * (4 if dtype == "float32" else 2) / 1e6
    return {
        "weights_mb": round(weights_mb),
        "held_mb": round(held_mb),
        "share": round(held_mb / weights_mb, 3),
        "before_mb": round(before_mb),
    }


def anonymous_mb() -> float:
    """Memory of this process that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Anonymous"))


def _in_own_process(role: str, folder: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmark.cpu.weights", "--role", role, "--folder", folder]
    ran = subprocess.run(
        [*command, "--dtype", dtype], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
