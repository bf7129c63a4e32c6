"""How the decoder's products of a few rows are laid out in the CPU's tiles. Knows no numba."""

from __future__ import annotations

from cluster.jit.tile_registers import TILE_ROWS
from cluster.model.dims import ModelDims

ROWS_OF_TILE = 8  # of x in one tile: each is a row of its upper and one of its lower halves
TILES_OF_BLOCK = 4
BLOCK_OUTPUTS = TILES_OF_BLOCK * TILE_ROWS  # that are computed at a time


def fits_tiles(dims: ModelDims) -> bool:
    """Whether whole tiles make up every product of the decoder's layers and head."""
    widths = (dims.n_text_state, dims.n_text_ffn)
    return all(width % BLOCK_OUTPUTS == 0 for width in widths) and dims.n_vocab >= BLOCK_OUTPUTS
