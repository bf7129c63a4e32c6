"""The encoder's kernels: the files that numba compiles, so that code of older ones is forgotten."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
KERNEL_SOURCES = tuple(
    _FOLDER / name
    for name in (
        "team_kernels.py",
        "heads.py",
        "float8_rows.py",
        "int8_rows.py",
        "tile_attention.py",
        "attention_steps.py",
    )
)
