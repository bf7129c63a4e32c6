"""The encoder's kernels as a worker asks for them. Imports numba only where they are built."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster.common.kernels.cpu.background import InBackground
from cluster.common.kernels.cpu.tile_registers import has_bfloat16_tiles

if TYPE_CHECKING:
    from encoder_worker.cpu.team_kernels import TeamKernels


from pathlib import Path

DTYPES = (torch.float32, torch.bfloat16)  # that there are kernels for

# The files that numba compiles, so that code of older ones is forgotten.
_FOLDER = Path(__file__).resolve().parent
KERNEL_SOURCES = tuple(
    _FOLDER / name
    for name in (
        "team_kernels.py",
        "rows.py",
        "int8_rows.py",
        "tile_attention.py",
        "attention_steps.py",
    )
)


def team_kernels(dtype: torch.dtype, *, int8: bool = False) -> InBackground[TeamKernels]:
    """Those of an encoder that computes in `dtype`, one of DTYPES; begins to build them.

    int8: with those for products of int8.
    """
    own = np.uint16 if dtype == torch.bfloat16 else np.float32
    tiles = dtype == torch.bfloat16 and has_bfloat16_tiles()
    name = own.__name__ + (" tiles" if tiles else "") + (" int8" if int8 else "")
    return InBackground("encoder", partial(_build, own, tiles, int8), KERNEL_SOURCES, name)


def _build(own: Any, tiles: bool, int8: bool) -> TeamKernels:
    from encoder_worker.cpu.team_kernels import build

    return build(own, tiles=tiles, int8=int8)
