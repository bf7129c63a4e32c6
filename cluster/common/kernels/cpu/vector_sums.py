"""Sums of products in 8 bits by vectors, for CPUs that have AVX-512 VNNI and no tiles.

Numbers lie as for tiles. One instruction multiplies four inputs of 16 outputs, of which one factor
is unsigned: so where rows are signed the weights are taken as 128 more than they are, and sums
begin at what that adds. Imports numba.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from cluster.common.kernels.cpu.tile_instructions import WORD, offset, procedure
from cluster.common.kernels.cpu.tile_registers import (
    INPUTS_OF_GROUP,
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
)
from cluster.common.kernels.cpu.vectors import INTS, LANES

_intrinsic: Any = intrinsic
_SUMS = 16  # vectors of sums at a time: half of the registers
MORE = 128  # of each weight, as it is multiplied
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
    return loaded


def _add_products(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """To each of 16 sums the products of four unsigned bytes and four signed ones."""
    signature = ir.FunctionType(INTS, [INTS] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = builder.module.declare_intrinsic(name, (), signature)
    return builder.call(function, [sums, unsigned, signed])


def _summing(n_rows: int, *, signed: bool = True) -> Any:
    """An intrinsic: the sums of a block's outputs over all inputs, of a tile's first `n_rows` rows.

    It takes addresses: x, the rows' tiles, `signed` or not; weight, the block's; then the number of
    either; begins, int32 [TILE_ROWS], where each row's sums begin: of signed ones at -MORE times
    the sum of its inputs; to, int32 [TILES_OF_BLOCK, TILE_ROWS, 16].
    """
    parts = range(n_rows)
    at_once = min(TILES_OF_BLOCK, _SUMS // len(parts))

    def add_tiles(
        builder: Any, tiles: range, x: Any, weight: Any, n_tiles: Any, begins: Any, to: Any
    ) -> None:
        # They become registers.
        room: Any = cgutils.alloca_once
        places = {which: room(builder, INTS) for which in product(tiles, parts)}
        for (_, part), place in places.items():
            builder.store(_number(builder, offset(builder, begins, 4 * part)), place)
        with cgutils.for_range(builder, n_tiles, intp=WORD) as loop:
            own = builder.add(x, builder.mul(loop.index, WORD(TILE_BYTES)))
            block = builder.mul(loop.index, WORD(TILE_BYTES * TILES_OF_BLOCK))
            at = builder.add(weight, block)
            sums = {which: builder.load(place) for which, place in places.items()}
            for group in range(TILE_ROWS):
                weights = {}
                for tile in tiles:
                    place = offset(builder, at, tile * TILE_BYTES + group * TILE_ROW_BYTES)
                    weights[tile] = _weights(builder, place)
                    if signed:
                        weights[tile] = builder.xor(weights[tile], _FLIPPED)
                for part in parts:
                    place = offset(builder, own, part * TILE_ROW_BYTES + group * INPUTS_OF_GROUP)
                    inputs = _number(builder, place)
                    for tile in tiles:
                        before = sums[tile, part]
                        both = (weights[tile], inputs) if signed else (inputs, weights[tile])
                        sums[tile, part] = _add_products(builder, before, *both)
            for which, place in places.items():
                builder.store(sums[which], place)
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


sum_2_rows, sum_4_rows, sum_8_rows, sum_16_rows = map(_summing, (2, 4, 8, TILE_ROWS))
sum_16_unsigned_rows = _summing(TILE_ROWS, signed=False)
