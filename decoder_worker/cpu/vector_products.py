"""Products of a few rows in 8 bits by AVX-512 VNNI, with the layouts of `tile_products`.

Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.tile_instructions import address
from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
)
from cluster.common.kernels.cpu.vector_sums import (
    MORE,
    sum_2_rows,
    sum_4_rows,
    sum_8_rows,
)
from decoder_worker.cpu.arrays import ROWS_OF_TILE
from decoder_worker.cpu.tile_products import scale_block, split_in_8_bits

_HALF_OF_TILE = TILE_ROWS // 2


@njit(nogil=True, cache=True)
def split_for_vectors(x: Any) -> Any:
    """Like `split_in_8_bits`, with the initial sums of a tile's rows, int32 [tiles, TILE_ROWS]."""
    split, steps = split_in_8_bits(x)
    begins = np.zeros((len(split), TILE_ROWS), np.int32)
    for group in range(len(split)):
        for tile in split[group]:
            for part in range(TILE_ROWS):
                total = np.int32(0)
                for c in range(TILE_ROW_BYTES):
                    total += np.int32(tile[part, c])
                begins[group, part] -= np.int32(MORE) * total
    return split, steps, begins


@njit(nogil=True, cache=True)
def int8_vector_product(
    rows: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any
) -> None:
    """Like `int8_tile_product`, of rows from `split_for_vectors`."""
    split, steps, begins = rows
    n_tiles = weight.shape[1]
    sums = np.empty((TILES_OF_BLOCK, TILE_ROWS, TILE_ROWS), np.int32)
    to = address(sums)
    for begin in range(first, last, BLOCK_OUTPUTS):
        at = address(weight[begin // BLOCK_OUTPUTS])
        for group in range(len(split)):
            x, where = address(split[group]), address(begins[group])
            n_rows = len(steps) - group * ROWS_OF_TILE
            if n_rows == 1:
                sum_2_rows(x, at, n_tiles, where, to)
            elif n_rows == 2:
                sum_4_rows(x, at, n_tiles, where, to)
            elif n_rows <= 4:
                sum_8_rows(x, at, n_tiles, where, to)
            else:  # the weights are in cache when they are read again
                sum_8_rows(x, at, n_tiles, where, to)
                more = _HALF_OF_TILE * TILE_ROW_BYTES
                sum_8_rows(x + more, at, n_tiles, where + 4 * _HALF_OF_TILE, to + more)
            scale_block(sums, group, steps, scale, begin, last, out)
