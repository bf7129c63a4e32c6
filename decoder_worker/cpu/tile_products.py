"""Products of a few rows by AMX tiles, of weights in 16 or 8 bits, on the calling thread.

A row of x float32 is split into two bfloat16, so that a sum is within 2 ** -16 of the exact one, or
into two integers: steps of a 127th of its largest value, and remainders in steps a 254th as large.
Eight rows take as long as one, since weights are read once. Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from cluster.common.kernels.cpu import vectors
from cluster.common.kernels.cpu.arithmetic import bfloat16_bits, number
from cluster.common.kernels.cpu.tile_instructions import (
    WORD,
    address,
    clear_tile,
    load_tile,
    multiply_int8_tiles,
    multiply_tiles,
    offset,
    procedure,
    store_tile,
)
from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    N_TILES,
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
)
from decoder_worker.cpu.arrays import ROWS_OF_TILE

STEPS = 127  # of a row's largest value, on either side of zero
FINER = 254  # steps of the second integer in one of the first
LEAST = np.float32(1e-30)  # of a row's largest value: steps per unit are finite above it

# Tile registers: sums of a block's outputs, then x, then weights by turns.
_SUMS, _X, _WEIGHTS = range(TILES_OF_BLOCK), TILES_OF_BLOCK, range(TILES_OF_BLOCK + 1, N_TILES)
_PARTS = range(TILE_ROW_BYTES // vectors.LANES)  # of the inputs in a tile's row of 8 bits
_intrinsic: Any = intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def clear_sums(_context: Any) -> Any:
    def write(builder: Any) -> None:
        for tile in _SUMS:
            clear_tile(builder, tile)

    return procedure(write, 0)


@_intrinsic  # type: ignore[untyped-decorator]
def _add_products(_context: Any, _x: Any, _weight: Any, _stride: Any) -> Any:
    """Add x times weights over one tile's inputs to a block's sums.

    x: address of a contiguous tile. weight: address of the block's first number there. stride:
    bytes from one output's weights to the next one's.
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
    """Store the sums at an address, as [BLOCK_OUTPUTS, 16] numbers of 32 bits."""

    def write(builder: Any, to: Any) -> None:
        for tile in _SUMS:
            store_tile(builder, tile, offset(builder, to, tile * TILE_BYTES))

    return procedure(write, 1)


@njit(nogil=True, cache=True)
def split_rows(x: Any) -> Any:
    """Split x float32 [n, n_in] into tiles: uint16 [ceil(n / 8), n_in / 2, 16, 2].

    A tile has pairs of inputs, and of each pair the upper and the lower halves of rows by turns.
    Missing rows are zero.
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
    """Add the products of the block of outputs from `begin` on; x: address of its tiles."""
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

    split: x, from `split_rows`. weight: uint16 [n_out, n_in], the bits of bfloat16, or the same
    `in_blocks`. first, last: borders of blocks.
    """
    n = len(out)
    sums = np.empty((BLOCK_OUTPUTS, 2 * ROWS_OF_TILE), np.float32)
    for begin in range(first, last, BLOCK_OUTPUTS):
        for group in range(len(split)):
            clear_sums()
            _add_block(address(split[group]), weight, begin)
            store_sums(address(sums))
            row = group * ROWS_OF_TILE
            for r in range(min(ROWS_OF_TILE, n - row)):
                to = out[row + r]
                for o in range(BLOCK_OUTPUTS):
                    to[begin + o] = scale[begin + o] * (sums[o, 2 * r] + sums[o, 2 * r + 1])


@_intrinsic  # type: ignore[untyped-decorator]
def _add_int8_products(_context: Any, _x: Any, _weight: Any) -> Any:
    """Add x times weights over 64 inputs to a block's sums; both are contiguous."""

    def write(builder: Any, x: ir.Value, weight: ir.Value) -> None:
        load_tile(builder, _X, x)
        for tile in _SUMS:
            register = _WEIGHTS[tile % len(_WEIGHTS)]
            load_tile(builder, register, offset(builder, weight, tile * TILE_BYTES))
            multiply_int8_tiles(builder, tile, _X, register)

    return procedure(write, 2)


@_intrinsic  # type: ignore[untyped-decorator]
def _magnitude(_context: Any, _x: Any) -> Any:
    """The bits of the largest absolute value of 64 float32 at an address; NaN is above all."""

    def generate(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        unsigned = ir.Constant(vectors.INTS, [0x7FFFFFFF] * vectors.LANES)
        largest = ir.Constant(vectors.INTS, [0] * vectors.LANES)
        for part in _PARTS:
            bits = builder.bitcast(_part(builder, args[0], part), vectors.INTS)
            bits = builder.and_(bits, unsigned)
            higher = builder.icmp_signed(">", bits, largest)
            largest = builder.select(higher, bits, largest)
        return vectors.highest_lane(builder, largest)

    return types.int32(types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _split_inputs(_context: Any, _x: Any, _step: Any, _per_step: Any, _to: Any) -> Any:
    """Split 64 float32 at an address into a tile's row at another one and the row behind it."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        x, step, per_step, to = args
        step, per_step = (vectors.everywhere(builder, one) for one in (step, per_step))
        finer = builder.fmul(per_step, vectors.constant(FINER))
        for part in _PARTS:
            number = _part(builder, x, part)
            whole = vectors.nearest_integer(builder, builder.fmul(number, per_step))
            left = builder.fsub(number, builder.fmul(whole, step))
            rest = vectors.nearest_integer(builder, builder.fmul(left, finer))
            most, least = vectors.constant(STEPS), vectors.constant(-STEPS)
            rest = vectors.greater(builder, vectors.lesser(builder, rest, most), least)
            at = offset(builder, to, part * vectors.LANES)
            vectors.store_in_8_bits(builder, whole, at)
            vectors.store_in_8_bits(builder, rest, offset(builder, at, TILE_ROW_BYTES))
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.float32, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _scale_sums(_context: Any, _sums: Any, _scale: Any, _step: Any, _to: Any) -> Any:
    """Scale a row's sums of a block into float32 [64]. scale: address of the first output's."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        sums, scale, step, to = args
        step = vectors.everywhere(builder, step)
        finer = vectors.constant(1.0 / FINER)
        for tile in _SUMS:
            at = offset(builder, sums, tile * TILE_BYTES)
            whole, rest = (
                vectors.load_integers(builder, offset(builder, at, row * TILE_ROW_BYTES))
                for row in range(2)
            )
            exact = builder.fadd(whole, builder.fmul(rest, finer))
            own_scale = builder.fmul(_part(builder, scale, tile), step)
            vectors.store(
                builder,
                builder.fmul(own_scale, exact),
                offset(builder, to, tile * TILE_ROW_BYTES),
            )
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32, types.int64), generate


def _part(builder: Any, numbers: Any, part: int) -> Any:
    return vectors.load(builder, offset(builder, numbers, part * 4 * vectors.LANES))


@njit(error_model="numpy", nogil=True, cache=True)
def split_in_8_bits(x: Any) -> Any:
    """Split x float32 [n, d], contiguous, into int8 tiles [ceil(n / 8), d / 64, 16, 64], and steps.

    A tile has a row's whole steps, then their remainders. Steps: float32 [n]. Missing rows are
    zero, and rows whose values are all below LEAST; a row that is not finite has no finite step.
    """
    n, d = x.shape
    n_tiles = d // TILE_ROW_BYTES
    split = np.zeros(((n + ROWS_OF_TILE - 1) // ROWS_OF_TILE, n_tiles, TILE_ROWS, 64), np.int8)
    steps, bits = np.zeros(n, np.float32), np.zeros(1, np.int32)
    for r in range(n):
        at = address(x[r])
        bits[0] = 0
        for t in range(n_tiles):
            bits[0] = max(bits[0], _magnitude(at + 256 * t))
        largest = bits.view(np.float32)[0]
        if not np.isfinite(largest):
            steps[r] = np.float32(np.nan)  # and so are all products
        elif largest >= LEAST:
            steps[r] = largest / np.float32(STEPS)
            per_step = np.float32(STEPS) / largest
            to = address(split[r // ROWS_OF_TILE]) + 2 * (r % ROWS_OF_TILE) * TILE_ROW_BYTES
            for t in range(n_tiles):
                _split_inputs(at + 256 * t, steps[r], per_step, to + TILE_BYTES * t)
    return split, steps


@njit(nogil=True, cache=True)
def int8_tile_product(rows: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """Like `tile_product` (`split_in_8_bits`, `in_int8_blocks`); `last` may be within a block."""
    split, steps = rows
    n_tiles = weight.shape[1]
    sums = np.empty((TILES_OF_BLOCK, TILE_ROWS, TILE_ROWS), np.int32)
    for begin in range(first, last, BLOCK_OUTPUTS):
        for group in range(len(split)):
            x, at = address(split[group]), address(weight[begin // BLOCK_OUTPUTS])
            clear_sums()
            for _ in range(n_tiles):
                _add_int8_products(x, at)
                x += TILE_BYTES
                at += TILE_ROW_BYTES * BLOCK_OUTPUTS
            store_sums(address(sums))
            scale_block(sums, group, steps, scale, begin, last, out)


@njit(nogil=True, cache=True)
def scale_block(
    sums: Any, group: Any, steps: Any, scale: Any, begin: Any, last: Any, out: Any
) -> None:
    """Scale the sums of a block and a group of rows into out[:, begin:last]."""
    for r in range(min(ROWS_OF_TILE, len(steps) - group * ROWS_OF_TILE)):
        row = group * ROWS_OF_TILE + r
        if begin + BLOCK_OUTPUTS <= last:
            own, scales = address(sums) + 2 * r * TILE_ROW_BYTES, address(scale) + 4 * begin
            _scale_sums(own, scales, steps[row], address(out[row]) + 4 * begin)
        else:
            _scale_last(sums, r, scale, steps[row], begin, last, out[row])


@njit(nogil=True, cache=True)
def _scale_last(sums: Any, r: Any, scale: Any, step: Any, first: Any, last: Any, out: Any) -> None:
    """Like `_scale_sums`, for a block with fewer outputs."""
    finer = np.float32(1.0 / FINER)
    for o in range(first, last):
        tile = sums[(o - first) // TILE_ROWS]
        whole = np.float32(tile[2 * r, (o - first) % TILE_ROWS])
        rest = np.float32(tile[2 * r + 1, (o - first) % TILE_ROWS])
        out[o] = scale[o] * step * (whole + rest * finer)
