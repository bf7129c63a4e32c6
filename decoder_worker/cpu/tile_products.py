"""Products of a few rows by the CPU's bfloat16 tiles, each on the calling thread.

Rows of x are float32, and stay nearly so: each is split into a bfloat16 and what that leaves, again
as a bfloat16, which stand side by side in a tile. Both products are added up in float32, so a sum
is within some 2 ** -16 of the exact one, whatever other rows there are. Eight rows take as long as
one: weights are read once. Those that lie in blocks are read from the first byte to the last, which
takes less time than to read 64 rows side by side.

Imports numba, and compiles only where `common.kernels.cpu.tile_registers.has_bfloat16_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic, overload

from cluster.common.kernels.cpu.arithmetic import bfloat16_bits, number
from cluster.common.kernels.cpu.tile_instructions import (
    WORD,
    address,
    clear_tile,
    load_tile,
    multiply_tiles,
    offset,
    procedure,
    store_tile,
)
from cluster.common.kernels.cpu.tile_registers import (
    N_TILES,
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
)
from decoder_worker.cpu.tile_blocks import BLOCK_OUTPUTS, ROWS_OF_TILE, TILES_OF_BLOCK

# Tile registers: sums of a block's outputs, then x, then weights by turns.
_SUMS, _X, _WEIGHTS = range(TILES_OF_BLOCK), TILES_OF_BLOCK, range(TILES_OF_BLOCK + 1, N_TILES)

_intrinsic: Any = intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def clear_sums(_context: Any) -> Any:
    """Set a block's sums to zero, of whichever numbers."""

    def write(builder: Any) -> None:
        for tile in _SUMS:
            clear_tile(builder, tile)

    return procedure(write, 0)


@_intrinsic  # type: ignore[untyped-decorator]
def _add_products(_context: Any, _x: Any, _weight: Any, _stride: Any) -> Any:
    """Add x times weights over one tile's inputs to a block's sums.

    x: address of a tile that lies together; weight: address of the block's first number there;
    stride: bytes from one output's weights to the next one's.
    """

    def write(builder: Any, x: Any, weight: Any, stride: Any) -> None:
        load_tile(builder, _X, x)
        for tile in _SUMS:
            register = _WEIGHTS[tile % len(_WEIGHTS)]
            first = builder.mul(stride, ir.Constant(WORD, tile * TILE_ROWS))
            load_tile(builder, register, builder.add(weight, first), stride)
            multiply_tiles(builder, tile, register, _X)

    return procedure(write, 3)


@_intrinsic  # type: ignore[untyped-decorator]
def store_sums(_context: Any, _to: Any) -> Any:
    """To [BLOCK_OUTPUTS, 16] at an address, numbers of 32 bits."""

    def write(builder: Any, to: Any) -> None:
        for tile in _SUMS:
            store_tile(builder, tile, offset(builder, to, tile * TILE_BYTES))

    return procedure(write, 1)


@njit(nogil=True, cache=True)
def split_rows(x: Any) -> Any:
    """x float32 [n, n_in] as tiles: uint16 [ceil(n / 8), n_in / 2, 16, 2].

    A tile has pairs of inputs, and of each pair the rows' upper halves and their lower ones by
    turns; rows that x does not have are zero.
    """
    n, n_in = x.shape
    split = np.zeros(((n + ROWS_OF_TILE - 1) // ROWS_OF_TILE, n_in // 2, 16, 2), np.uint16)
    for r in range(n):
        row, tiles, column = x[r], split[r // ROWS_OF_TILE], 2 * (r % ROWS_OF_TILE)
        for c in range(n_in):
            upper = bfloat16_bits(row[c])
            tiles[c >> 1, column, c & 1] = upper
            tiles[c >> 1, column + 1, c & 1] = bfloat16_bits(row[c] - number(upper))
    return split


def _add_block(x: Any, weight: Any, begin: Any) -> None:
    """Add to the sums what the block of outputs from `begin` on has; x: address of its tiles."""
    raise NotImplementedError("only inside a kernel")


@overload(_add_block)
def _add_block_of(x, weight, begin):
    def in_rows(x, weight, begin):
        n_in = weight.shape[1]
        stride = np.int64(2 * n_in)
        at = address(weight) + begin * stride
        for _ in range(n_in // TILE_INPUTS):
            _add_products(x, at, stride)
            x += TILE_BYTES
            at += TILE_ROW_BYTES

    def in_blocks(x, weight, begin):
        at = address(weight[begin // BLOCK_OUTPUTS])
        for _ in range(weight.shape[1]):
            _add_products(x, at, np.int64(TILE_ROW_BYTES))
            x += TILE_BYTES
            at += TILE_ROW_BYTES * BLOCK_OUTPUTS

    return in_rows if weight.ndim == 2 else in_blocks


@njit(nogil=True, cache=True)
def tile_product(split: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] = scale * (weight @ x), for float32 out [n, n_out].

    Args:
        split: x, from `split_rows`.
        weight: uint16 [n_out, n_in], the bits of bfloat16; or the same `in_blocks`.
        first, last: at least BLOCK_OUTPUTS outputs; of a weight in blocks, whole blocks. Where they
            are no multiple of that, the last block begins earlier, and gives some outputs twice,
            the same both times.
    """
    n = len(out)
    sums = np.empty((BLOCK_OUTPUTS, 2 * ROWS_OF_TILE), np.float32)
    for block in range(first, last, BLOCK_OUTPUTS):
        begin = min(block, last - BLOCK_OUTPUTS)
        for group in range(len(split)):
            clear_sums()
            _add_block(address(split[group]), weight, begin)
            store_sums(address(sums))
            row = group * ROWS_OF_TILE
            for r in range(min(ROWS_OF_TILE, n - row)):
                to = out[row + r]
                for o in range(BLOCK_OUTPUTS):
                    to[begin + o] = scale[begin + o] * (sums[o, 2 * r] + sums[o, 2 * r + 1])
