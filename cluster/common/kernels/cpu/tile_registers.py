"""Detect and configure tile registers (Intel's AMX). No numba.

A tile register holds 16 rows of 64 bytes; one instruction multiplies 32 inputs of bfloat16 or 64 of
8 bits for 16 outputs and 16 columns. Source: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
TILE_INPUTS = 32  # bfloat16 numbers in a row of a tile
HEAD_DIM = 64  # of every published checkpoint; attention by tiles needs it
N_TILES = 8
TILES_OF_BLOCK = 4  # tiles of outputs that are computed at a time
INPUTS_OF_GROUP = 4  # int8 inputs that one instruction sums for an output
BLOCK_OUTPUTS = TILES_OF_BLOCK * TILE_ROWS
CONFIG_BYTES = 64
VECTORS = True  # in place of a configuration: multiply int8 by vectors, laid out as for tiles


def has_bfloat16_tiles() -> bool:
    """Whether the CPU multiplies bfloat16 and int8 in tiles, and the system allows it."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_both = bool(capabilities.get("amx_bf16")) and bool(capabilities.get("amx_int8"))
    return has_both and bool(torch.cpu._init_amx())


def products_for(*, bfloat16: bool, int8: bool) -> Any:
    """Choose how products of few rows are computed over weights that are stored so. Return the
    tiles' configuration, `VECTORS`, or None for plain loops.
    """
    if bfloat16 and has_bfloat16_tiles():
        return tile_config()
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return VECTORS if int8 and capabilities.get("avx512_vnni") else None


def tile_config() -> Any:
    """Return the configuration of 8 full tiles, uint8 [CONFIG_BYTES]."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1  # the palette: 8 tiles of 1 kB
    config[16:32].view(np.uint16)[:] = TILE_ROW_BYTES
    config[48:56] = TILE_ROWS
    return config
