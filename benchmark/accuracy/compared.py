"""Variants of one model beside a reference on the same clips: what those benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.shared.clips import add_clip_flags
from benchmark.shared.command import make_parser
from benchmark.shared.word_errors import WordErrors, difference, total

COLUMNS = ("WER", "points", "95 %", "same text")


def clips_parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line that takes clips, threads, and a file for the figures."""
    parser = make_parser(doc)
    add_clip_flags(parser)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 takes every core")
    parser.add_argument("--save", type=Path, help="write the figures here as well")
    return parser


def compare(
    texts: Sequence[str],
    errors: Sequence[WordErrors],
    reference_texts: Sequence[str],
    reference_errors: Sequence[WordErrors],
) -> dict[str, Any]:
    """wer in percent, points above the reference's with their interval, and equal texts."""
    return {
        "wer": round(total(errors).wer, 3),
        "points": [round(value, 3) for value in difference(errors, reference_errors)],
        "same_texts": sum(map(str.__eq__, texts, reference_texts)),
    }


def cells(row: dict[str, Any], n_clips: int) -> tuple[str, ...]:
    """Of `COLUMNS`, of what `compare` returned."""
    points, low, high = row["points"]
    same = f"{row['same_texts']} of {n_clips}"
    return f"{row['wer']:.2f} %", f"{points:+.2f}", f"{low:+.2f} to {high:+.2f}", same
