"""Sums of int8 products by vectors, for CPUs with AVX-512 VNNI but without tiles. Imports numba.

Numbers lie as for tiles. One instruction multiplies four inputs of 16 outputs, and one factor is
unsigned. So where rows are signed, 128 is added to each weight, and sums begin at minus what that
adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
MORE = 128  # added to each weight that is multiplied
_FLIPPED = ir.Constant(INTS, [-0x7F7F7F80] * LANES)  # 0x80 in each byte: adds 128 to an int8


def _number(builder: Any, at: Any) -> Any:
    loaded = builder.load(builder.inttoptr(at, ir.IntType(32).as_pointer()))
    loaded.align = 4
    zero = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(INTS, ir.Undefined), loaded, zero)
    lanes = ir.Constant(INTS, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(INTS, ir.Undefined), lanes)


def _vector(builder: Any, at: Any) -> Any:
    loaded = builder.load(builder.inttoptr(at, INTS.as_pointer()))
    loaded.align = 4
    return loaded


def _add_products(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Add to each of 16 sums the products of four unsigned and four signed bytes."""
    signature = ir.FunctionType(INTS, [INTS] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = builder.module.declare_intrinsic(name, (), signature)
    return builder.call(function, [sums, unsigned, signed])


def _summing(n_rows: int, *, signed: bool = True) -> Any:
    """Make an intrinsic that sums a block's outputs for the first `n_rows` rows of x.

    It takes the addresses of the rows' tiles, `signed` or not, and of the block's weights; the
    number of tiles of either; the address of begins, int32 [TILE_ROWS], where each row's sums begin
    (of signed rows at -MORE times the sum of its inputs); and that of the results, int32
    [TILES_OF_BLOCK, TILE_ROWS, 16].
    """
    rows = [TILE_ROW_BYTES * part for part in range(n_rows)]

    def add(builder: Any, sums: list[Any], x: Any, weight: Any) -> list[Any]:
        for group in range(TILE_ROWS):
            weights = _vector(builder, offset(builder, weight, group * TILE_ROW_BYTES))
            if signed:
                weights = builder.xor(weights, _FLIPPED)
            for part, row in enumerate(rows):
                inputs = _number(builder, offset(builder, x, row + group * INPUTS_OF_GROUP))
                both = (weights, inputs) if signed else (inputs, weights)
                sums[part] = _add_products(builder, sums[part], *both)
        return sums

    def load(builder: Any, at: Any) -> list[Any]:
        return [_vector(builder, offset(builder, at, row)) for row in rows]

    def store(builder: Any, sums: list[Any], to: Any) -> None:
        for row, own in zip(rows, sums, strict=True):
            at = offset(builder, to, row)
            builder.store(own, builder.inttoptr(at, INTS.as_pointer())).align = 4

    def from_first_to_last(
        builder: Any, x: Any, weight: Any, n_tiles: Any, begin: list[Any], to: Any
    ) -> None:
        """Read weights in memory order: 2 to 3 times as fast where memory is the limit."""
        for tile in range(TILES_OF_BLOCK):
            store(builder, begin, offset(builder, to, tile * TILE_BYTES))
        with _turns(builder, n_tiles, TILE_BYTES) as own:
            block = builder.mul(own, WORD(TILES_OF_BLOCK))
            with _turns(builder, WORD(TILES_OF_BLOCK), TILE_BYTES) as tile:
                sums, at = builder.add(to, tile), builder.add(builder.add(weight, block), tile)
                added = add(builder, load(builder, sums), builder.add(x, own), at)
                store(builder, added, sums)

    def by_outputs(
        builder: Any, x: Any, weight: Any, n_tiles: Any, begin: list[Any], to: Any
    ) -> None:
        """Keep the sums of 16 outputs in registers: faster where instructions are the limit."""
        room: Any = cgutils.alloca_once
        places = [room(builder, INTS) for _ in rows]  # they become registers
        with _turns(builder, WORD(TILES_OF_BLOCK), TILE_BYTES) as tile:
            for place, one in zip(places, begin, strict=True):
                builder.store(one, place)
            with _turns(builder, n_tiles, TILE_BYTES) as own:
                block = builder.mul(own, WORD(TILES_OF_BLOCK))
                at = builder.add(builder.add(weight, block), tile)
                sums = [builder.load(place) for place in places]
                added = add(builder, sums, builder.add(x, own), at)
                for place, one in zip(places, added, strict=True):
                    builder.store(one, place)
            store(builder, [builder.load(place) for place in places], builder.add(to, tile))

    @_intrinsic  # type: ignore[untyped-decorator]
    def add_all(_context: Any, _x: Any, _weight: Any, _n_tiles: Any, _begins: Any, _to: Any) -> Any:
        def write(builder: Any, x: Any, weight: Any, n_tiles: Any, begins: Any, to: Any) -> None:
            begin = [_number(builder, offset(builder, begins, 4 * part)) for part in range(n_rows)]
            way = by_outputs if n_rows == TILE_ROWS else from_first_to_last
            way(builder, x, weight, n_tiles, begin, to)

        return procedure(write, 5)

    return add_all


@contextmanager
def _turns(builder: Any, n: Any, n_bytes: int) -> Iterator[Any]:
    """Emit a loop of n turns, and yield the offset of each turn in bytes."""
    with cgutils.for_range(builder, n, intp=WORD) as loop:
        yield builder.mul(loop.index, WORD(n_bytes))


sum_2_rows, sum_4_rows, sum_8_rows, sum_16_rows = map(_summing, (2, 4, 8, TILE_ROWS))
sum_16_unsigned_rows = _summing(TILE_ROWS, signed=False)
