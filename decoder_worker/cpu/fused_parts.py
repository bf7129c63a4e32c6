"""Products and norms of a few rows, each on the calling thread and on a part of the outputs.

Whether products by the CPU's tiles (`tile_products`) are compiled is decided here, by whether there
is a configuration of tiles. Imports numba: `fused_kernels` is made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from cluster.common.kernels.cpu.arithmetic import erf, number
from cluster.common.kernels.cpu.rows import SUMS, add_norm_row
from cluster.common.kernels.cpu.tile_instructions import begin_tiles, end_tiles
from decoder_worker.cpu.tile_products import (
    int8_tile_product,
    split_in_8_bits,
    split_rows,
    tile_product,
)

_HALF, _ONE, _SQRT_HALF = np.float32(0.5), np.float32(1), np.float32(0.7071067811865476)


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_one(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    for n in range(first, last):
        row = weight[n]
        a = np.float32(0)
        for c in range(len(row)):
            a += x[c] * number(row[c])
        out[n] = a * scale[n]


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_four(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    for n in range(first, last):
        row, s = weight[n], scale[n]
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(row)):
            w = number(row[i])
            a += x0[i] * w
            b += x1[i] * w
            c += x2[i] * w
            d += x3[i] * w
        out0[n], out1[n], out2[n], out3[n] = a * s, b * s, c * s, d * s


def begin_product(x: Any, weight: Any, tiles: Any) -> Any:
    """What `product` takes of x float32 [n, n_in] on this thread, which calls `end_product` last.

    weight: what it will be multiplied by. tiles: as in `arrays.Layers`.
    """
    raise NotImplementedError("only inside a kernel")


@overload(begin_product)
def _begin_product(x, weight, tiles):
    if isinstance(tiles, types.NoneType):
        return lambda x, weight, tiles: x

    def split_in_16_bits(x, weight, tiles):
        begin_tiles(tiles)
        return split_rows(x)

    def split_for_int8(x, weight, tiles):
        begin_tiles(tiles)
        return split_in_8_bits(x)

    return split_for_int8 if weight.dtype == types.int8 else split_in_16_bits


def end_product(tiles: Any) -> None:
    """This thread multiplies no more, for now."""
    raise NotImplementedError("only inside a kernel")


@overload(end_product)
def _end_product(tiles):
    if isinstance(tiles, types.NoneType):
        return lambda tiles: None
    return lambda tiles: end_tiles()


def product(x: Any, weight: Any, scale: Any, tiles: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] of what `begin_product` gave: weights are read from memory once."""
    raise NotImplementedError("only inside a kernel")


@overload(product)
def _product(x, weight, scale, tiles, first, last, out):
    if isinstance(tiles, types.NoneType):
        return lambda x, weight, scale, tiles, first, last, out: plain_product(
            x, weight, scale, first, last, out
        )
    if weight.dtype == types.int8:
        return lambda x, weight, scale, tiles, first, last, out: int8_tile_product(
            x, weight, scale, first, last, out
        )
    return lambda x, weight, scale, tiles, first, last, out: tile_product(
        x, weight, scale, first, last, out
    )


@njit(nogil=True, cache=True)
def plain_product(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] of x float32 [n, n_in]: a block of weights is read from memory once."""
    fours = len(x) // 4 * 4
    for row in range(0, fours, 4):
        _product_of_four(x[row : row + 4], weight, scale, first, last, out[row : row + 4])
    for row in range(fours, len(x)):
        _product_of_one(x[row], weight, scale, first, last, out[row])


# Of Python's error model a division could raise, and a loop with it takes one number at a time.
@njit(fastmath=SUMS, error_model="numpy", nogil=True, cache=True)
def finish_product(out: Any, bias: Any, first: Any, last: Any, gelu: Any) -> None:
    for r in range(len(out)):
        row = out[r]
        if gelu:
            for n in range(first, last):
                x = row[n] + bias[n]
                row[n] = x * _HALF * (_ONE + erf(x * _SQRT_HALF))
        else:
            for n in range(first, last):
                row[n] += bias[n]


@njit(nogil=True, cache=True)
def norm(norm: Any, x: Any, delta: Any, normed: Any) -> None:
    """Add what a product gave, and norm the sum for the next one. norm [2, d]."""
    for r in range(len(x)):
        add_norm_row(x[r], delta[r], norm[0], norm[1], normed[r])
