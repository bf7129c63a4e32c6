"""The encoder's kernels as a worker asks for them. Imports numba only where they are built."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster.jit.background import InBackground
from cluster.jit.tile_registers import has_bfloat16_tiles
from encoder_worker.cpu.sources import KERNEL_SOURCES

if TYPE_CHECKING:
    from encoder_worker.cpu.team_kernels import TeamKernels

DTYPES = (torch.float32, torch.bfloat16)  # that there are kernels for


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
