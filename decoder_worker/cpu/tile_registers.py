"""Whether this CPU multiplies bfloat16 in tiles (Intel's AMX), and how it is told their sizes.

A tile register holds 16 rows of 64 bytes, and one instruction multiplies two of them: 16 outputs
by 16 columns over 32 inputs. `decoder_worker.cpu.tile_products` uses it; this knows no numba.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cluster.model.dims import ModelDims

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_INPUTS = 32  # bfloat16 numbers in a row of a tile
ROWS_OF_TILE = 8  # of x in one tile: each is a row of its upper and one of its lower halves
TILES_OF_BLOCK = 4
BLOCK_OUTPUTS = TILES_OF_BLOCK * TILE_ROWS  # that are computed at a time
CONFIG_BYTES = 64


def has_bfloat16_tiles() -> bool:
    """Whether the CPU has them and this process may use them: the system is asked once."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16")) and bool(torch.cpu._init_amx())


def fits_tiles(dims: ModelDims) -> bool:
    """Whether whole tiles make up every product of the decoder's layers and head."""
    widths = (dims.n_text_state, dims.n_text_ffn)
    return all(width % BLOCK_OUTPUTS == 0 for width in widths) and dims.n_vocab >= BLOCK_OUTPUTS


def tile_config() -> Any:
    """What the CPU is told before tiles are used, uint8 [CONFIG_BYTES]: all of them are whole."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1  # the palette: 8 tiles of 1 kB
    config[16:32].view(np.uint16)[:] = TILE_ROW_BYTES
    config[48:56] = TILE_ROWS
    return config
