"""The encoder's kernels: the files that numba compiles, so that code of older ones is forgotten."""

from __future__ import annotations

from pathlib import Path

KERNEL_SOURCES = (Path(__file__).with_name("team_kernels.py"),)
