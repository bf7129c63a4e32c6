"""What cross-attention KV of fewer bits costs in words.

Weights and everything else in float32, so that all that differs is the KV in its pages. Every clip
goes through the whole path, greedily, with `kv_dtype` set; its errors are compared clip by clip
with float32's; the gate is 0.3 points for float8, 0.1 for the others.

    python -m benchmark.accuracy.kv_dtype [--demo N] [--threads 0] [--save FILE]

Clips are those of `benchmark.accuracy.wer`; without a flag the recordings of the package. Prints
the sizes first, then the table, one JSON line last; ends with status 1 when the gate fails.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmark.shared.clips import add_clip_flags, clips_of
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.word_errors import WordErrors, count_all, difference, total
from cluster.common.kv.connect import served_kv_layout
from cluster.common.kv.layout import window_bytes
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.device import use_threads
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.demo.recipe.evaluate import transcribe_served
from router.api.params import TranscriptionParams

REFERENCE = "float32"
DTYPES = (REFERENCE, "bfloat16", "float16", "float8")
GATES = {"float8": 0.3}  # points of word error rate above the reference's
GATE = 0.1
PARAMS = TranscriptionParams(model="demo", language="en", seed=0, fallback=False)


@dataclass
class Row:
    """One dtype's figures."""

    window_bytes: int
    errors: list[WordErrors] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def settings_of(kv_dtype: str, threads: int) -> Settings:
    role = {"device": "cpu", "dtype": "float32", "threads": threads}
    flags = {"kv_dtype": kv_dtype, "encoder": role, "decoder": role}
    return load_settings(None, {**flags, "router": {"audio_workers": 1}}, environ={})


def report(rows: dict[str, Row]) -> dict[str, Any]:
    reference = rows[REFERENCE]
    by_dtype = {}
    for name, row in rows.items():
        points = difference(row.errors, reference.errors)
        by_dtype[name] = {
            "mb": round(row.window_bytes / 1e6, 3),
            "wer": round(total(row.errors).wer, 3),
            "points": [round(value, 3) for value in points],
            "same_texts": sum(map(str.__eq__, row.texts, reference.texts)),
            "passed": points[0] <= GATES.get(name, GATE),
        }
    return {
        "model": "demo",
        "clips": len(reference.texts),
        "words": total(reference.errors).words,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "dtypes": by_dtype,
    }


def print_table(made: dict[str, Any]) -> None:
    columns = ("KV", "WER", "points", "95 %", "same text")
    table = Table(*columns, title="Cross-attention KV of fewer bits, the rest in float32")
    for name, row in made["dtypes"].items():
        points, low, high = row["points"]
        table.add_row(
            name,
            f"{row['wer']:.2f} %",
            f"{points:+.2f}",
            f"{low:+.2f} to {high:+.2f}",
            f"{row['same_texts']} of {made['clips']}",
        )
    Console(width=100).print(table)


def main() -> int:
    parser = make_parser(__doc__)
    add_clip_flags(parser)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 takes every core")
    parser.add_argument("--save", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    clips = [clip for clip in clips_of(args) if clip.reference]
    use_threads(args.threads)
    settings = {name: settings_of(name, args.threads) for name in DTYPES}
    checkpoint = open_checkpoint("demo", weights=False)
    rows = {
        name: Row(window_bytes(served_kv_layout(checkpoint, one, "cpu")))
        for name, one in settings.items()
    }
    sizes = ", ".join(f"{name} {row.window_bytes / 1e6:.2f} MB" for name, row in rows.items())
    print(f"One window: {sizes}. {len(clips)} clips.", flush=True)

    files = [clip.read() for clip in clips]
    for name, row in rows.items():
        heard = transcribe_served(settings[name], PARAMS, files)
        row.texts = [transcript.text for transcript in heard]
        row.errors = count_all([clip.reference or "" for clip in clips], row.texts, "en")
        print(f"transcribed with {name}", file=sys.stderr, flush=True)
    made = report(rows)
    print_table(made)
    print_result("kv_dtype", made, args.save)
    return 0 if all(row["passed"] for row in made["dtypes"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
