"""Products of a few rows in 8 bits by vectors, for CPUs that have AVX-512 VNNI and no tiles.

Rows are split, weights lie, and sums are scaled as in `tile_products`; the sums are exact, too. One
instruction multiplies four inputs of 16 outputs, of which one factor is unsigned: so the weights
are taken as 128 more than they are, and sums begin at what that adds. Imports numba.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.extending import intrinsic

from cluster.common.kernels.cpu.tile_instructions import WORD, address, offset, procedure
from cluster.common.kernels.cpu.tile_registers import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from cluster.common.kernels.cpu.vectors import INTS, LANES
from decoder_worker.cpu.arrays import (
    BLOCK_OUTPUTS,
    INPUTS_OF_GROUP,
    ROWS_OF_TILE,
    TILES_OF_BLOCK,
)
from decoder_worker.cpu.tile_products import scale_block, split_in_8_bits

_intrinsic: Any = intrinsic
_SUMS = 16  # vectors of sums at a time: half of the registers
_MORE = 128  # of each weight, as it is multiplied
_FLIPPED = ir.Constant(INTS, [-0x7F7F7F80] * LANES)  # 0x80 in each byte: adds 128 to an int8


def _number(builder: Any, at: Any) -> Any:
    """A vector that has the 32 bits from an address in each lane."""
    loaded = builder.load(builder.inttoptr(at, ir.IntType(32).as_pointer()))
    loaded.align = 4
    zero = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(INTS, ir.Undefined), loaded, zero)
    lanes = ir.Constant(INTS, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(INTS, ir.Undefined), lanes)


def _weights(builder: Any, at: Any) -> Any:
    loaded = builder.load(builder.inttoptr(at, INTS.as_pointer()))
    loaded.align = 4
    return builder.xor(loaded, _FLIPPED)


def _add_products(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """To each of 16 sums the products of four unsigned bytes and four signed ones."""
    signature = ir.FunctionType(INTS, [INTS] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = builder.module.declare_intrinsic(name, (), signature)
    return builder.call(function, [sums, weights, inputs])


def _summing(n_rows: int) -> Any:
    """An intrinsic: the sums of a block's outputs over all inputs, of a tile's first `n_rows`.

    It takes addresses: x, the rows' tiles; weight, the block's; then the number of either; begins,
    int32 [TILE_ROWS], where sums begin; to, int32 [TILES_OF_BLOCK, TILE_ROWS, 16].
    """
    parts = range(2 * n_rows)  # each row has its whole steps, and what these leave
    at_once = min(TILES_OF_BLOCK, _SUMS // len(parts))

    def add_tiles(
        builder: Any, tiles: range, x: Any, weight: Any, n_tiles: Any, begins: Any, to: Any
    ) -> None:
        places = {
            both: cgutils.alloca_once(builder, INTS) for both in product(tiles, parts)
        }  # become registers
        for (_, part), place in places.items():
            builder.store(_number(builder, offset(builder, begins, 4 * part)), place)
        with cgutils.for_range(builder, n_tiles, intp=WORD) as loop:
            own = builder.add(x, builder.mul(loop.index, WORD(TILE_BYTES)))
            block = builder.mul(loop.index, WORD(TILE_BYTES * TILES_OF_BLOCK))
            at = builder.add(weight, block)
            sums = {both: builder.load(place) for both, place in places.items()}
            for group in range(TILE_ROWS):
                weights = {
                    tile: _weights(
                        builder, offset(builder, at, tile * TILE_BYTES + group * TILE_ROW_BYTES)
                    )
                    for tile in tiles
                }
                for part in parts:
                    place = offset(builder, own, part * TILE_ROW_BYTES + group * INPUTS_OF_GROUP)
                    inputs = _number(builder, place)
                    for tile in tiles:
                        before = sums[tile, part]
                        sums[tile, part] = _add_products(builder, before, weights[tile], inputs)
            for both, place in places.items():
                builder.store(sums[both], place)
        for (tile, part), place in places.items():
            at = offset(builder, to, tile * TILE_BYTES + part * TILE_ROW_BYTES)
            builder.store(builder.load(place), builder.inttoptr(at, INTS.as_pointer())).align = 4

    @_intrinsic  # type: ignore[untyped-decorator]
    def add(_context: Any, _x: Any, _weight: Any, _n_tiles: Any, _begins: Any, _to: Any) -> Any:
        def write(builder: Any, *args: Any) -> None:
            for first in range(0, TILES_OF_BLOCK, at_once):
                add_tiles(builder, range(first, first + at_once), *args)

        return procedure(write, 5)

    return add


_of_one, _of_two, _of_four, _of_eight = (_summing(n_rows) for n_rows in (1, 2, 4, ROWS_OF_TILE))


@njit(nogil=True, cache=True)
def split_for_vectors(x: Any) -> Any:
    """As `split_in_8_bits`, and where the sums of a tile's rows begin, int32 [tiles, TILE_ROWS]."""
    split, steps = split_in_8_bits(x)
    begins = np.zeros((len(split), TILE_ROWS), np.int32)
    for group in range(len(split)):
        for tile in split[group]:
            for part in range(TILE_ROWS):
                total = np.int32(0)
                for c in range(TILE_ROW_BYTES):
                    total += np.int32(tile[part, c])
                begins[group, part] -= np.int32(_MORE) * total
    return split, steps, begins


@njit(nogil=True, cache=True)
def int8_vector_product(
    rows: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any
) -> None:
    """As `int8_tile_product`, of rows from `split_for_vectors`."""
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
                _of_one(x, at, n_tiles, where, to)
            elif n_rows == 2:
                _of_two(x, at, n_tiles, where, to)
            elif n_rows <= 4:
                _of_four(x, at, n_tiles, where, to)
            else:
                _of_eight(x, at, n_tiles, where, to)
            scale_block(sums, group, steps, scale, begin, last, out)
