"""How the decoder's products of a few rows are laid out in the CPU's tiles. Knows no numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster.common.kernels.cpu.tile_registers import TILE_ROW_BYTES, TILE_ROWS
from cluster.common.model.dims import ModelDims

ROWS_OF_TILE = 8  # of x in one tile: each is a row of its upper and one of its lower halves
TILES_OF_BLOCK = 4
INPUTS_OF_GROUP = 4  # of 8 bits, which a tile multiplies at a time
BLOCK_OUTPUTS = TILES_OF_BLOCK * TILE_ROWS  # that are computed at a time


def fits_tiles(dims: ModelDims) -> bool:
    """Whether whole tiles make up every product of the decoder's layers and head."""
    widths = (dims.n_text_state, dims.n_text_ffn)
    return all(width % BLOCK_OUTPUTS == 0 for width in widths) and dims.n_vocab >= BLOCK_OUTPUTS


def in_blocks(weight: Any) -> Any:
    """A copy of weight [n_out, n_in] in the order in which products read it.

    What a block of outputs needs of the inputs of one tile lies together. Of 16 bits each output's
    are a row of 64 bytes: [n_out / 64, n_in / 32, 64, 32]. Of 8 bits see `in_int8_blocks`.
    """
    if weight.itemsize == 1:
        return in_int8_blocks(weight)
    n_inputs = TILE_ROW_BYTES // weight.itemsize
    blocks = weight.reshape(-1, BLOCK_OUTPUTS, weight.shape[1] // n_inputs, n_inputs)
    return np.ascontiguousarray(blocks.swapaxes(1, 2))


def in_int8_blocks(weight: Any) -> Any:
    """The same of 8 bits: [n_out / 64, n_in / 64, 64, 64], where n_out may end within a block.

    Four tiles of 16 outputs each; a tile's row has four inputs of every output, so that its sums
    lie side by side. Behind the last output are zeros.
    """
    n_out, n_in = weight.shape
    padded = np.zeros((-(-n_out // BLOCK_OUTPUTS) * BLOCK_OUTPUTS, n_in), weight.dtype)
    padded[:n_out] = weight
    tiles = padded.reshape(
        -1, TILES_OF_BLOCK, TILE_ROWS, n_in // TILE_ROW_BYTES, TILE_ROWS, INPUTS_OF_GROUP
    )
    blocks = tiles.transpose(0, 3, 1, 4, 2, 5)  # block, its inputs, tile, group, output, input
    return np.ascontiguousarray(blocks).reshape(
        -1, n_in // TILE_ROW_BYTES, BLOCK_OUTPUTS, TILE_ROW_BYTES
    )
