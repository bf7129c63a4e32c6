"""The decoder's kernels: the files that numba compiles, so that code of older ones is forgotten."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
KERNEL_SOURCES = (
    _FOLDER / "attention_kernels.py",
    _FOLDER / "attention_parts.py",
    _FOLDER / "attention_vectors.py",
    _FOLDER / "coarse_head.py",
    _FOLDER / "fused_arrays.py",
    _FOLDER / "fused_kernels.py",
    _FOLDER / "fused_parts.py",
    _FOLDER / "int8_products.py",
    _FOLDER / "likely_logits.py",
    _FOLDER / "sampling_kernels.py",
    _FOLDER / "several" / "arrays.py",
    _FOLDER / "several" / "kernels.py",
    _FOLDER / "step_team.py",
    _FOLDER / "tile_products.py",
    _FOLDER / "tile_blocks.py",
    _FOLDER / "work_sharing.py",
    _FOLDER.parent / "sampling" / "slots.py",
)
