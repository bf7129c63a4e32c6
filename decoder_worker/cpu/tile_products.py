"""Products of a few rows by the CPU's bfloat16 tiles, each on the calling thread.

Rows of x are float32, and stay nearly so: each is split into a bfloat16 and what that leaves, again
as a bfloat16, which stand side by side in a tile. Both products are added up in float32, so a sum
is within some 2 ** -16 of the exact one, whatever other rows there are. Eight rows take as long as
one: weights are read once, in the order that they lie in.

The intrinsics are LLVM's names for the instructions. Imports numba, and compiles only where
`decoder_worker.cpu.tile_registers.has_bfloat16_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cluster.jit.arithmetic import bfloat16_bits, number
from decoder_worker.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    ROWS_OF_TILE,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
)

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()
_TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
# Tile registers: sums of a block's outputs, then x, then weights by turns.
_SUMS, _X, _WEIGHTS = range(TILES_OF_BLOCK), TILES_OF_BLOCK, range(TILES_OF_BLOCK + 1, 8)

_intrinsic: Any = intrinsic


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _emit(builder: Any, name: str, *args: Any) -> None:
    """Call one of LLVM's intrinsics, which gives nothing."""
    signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), signature), args)


@_intrinsic  # type: ignore[untyped-decorator]
def _address(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _WORD)

    return types.int64(array), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _begin_tiles(_context: Any, _config: Any) -> Any:
    """Set up the thread's tiles from the configuration at an address."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _emit(builder, "ldtilecfg", builder.inttoptr(args[0], _POINTER))
        return context.get_dummy_value()

    return types.none(types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def end_tiles(_context: Any) -> Any:
    """Give the thread's tiles back, so that the system need not save them."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _clear_sums(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        for tile in _SUMS:
            _emit(builder, "tilezero", _tile(tile))
        return context.get_dummy_value()

    return types.none(), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _add_products(_context: Any, _x: Any, _weight: Any, _stride: Any) -> Any:
    """Add x times weights over one tile's inputs to a block's sums.

    x: address of a tile that lies together; weight: address of the block's first number there;
    stride: bytes from one output's weights to the next one's.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        x, weight, stride = args
        row_bytes = ir.Constant(_WORD, TILE_ROW_BYTES)
        _emit(builder, "tileloadd64", _tile(_X), builder.inttoptr(x, _POINTER), row_bytes)
        for tile in _SUMS:
            register = _WEIGHTS[tile % len(_WEIGHTS)]
            first = builder.mul(stride, ir.Constant(_WORD, tile * TILE_ROWS))
            pointer = builder.inttoptr(builder.add(weight, first), _POINTER)
            _emit(builder, "tileloadd64", _tile(register), pointer, stride)
            _emit(builder, "tdpbf16ps", _tile(tile), _tile(register), _tile(_X))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _store_sums(_context: Any, _to: Any) -> Any:
    """To float32 [BLOCK_OUTPUTS, 16] at an address."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row_bytes = ir.Constant(_WORD, TILE_ROW_BYTES)
        for tile in _SUMS:
            first = builder.add(args[0], ir.Constant(_WORD, tile * _TILE_BYTES))
            pointer = builder.inttoptr(first, _POINTER)
            _emit(builder, "tilestored64", _tile(tile), pointer, row_bytes)
        return context.get_dummy_value()

    return types.none(types.int64), generate


@njit(nogil=True, cache=True)
def begin_tiles(config: Any) -> None:
    """Set up the calling thread's tiles; it must call `end_tiles` before torch computes there."""
    _begin_tiles(_address(config))


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


@njit(nogil=True, cache=True)
def tile_product(split: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] = scale * (weight @ x), for float32 out [n, n_out].

    Args:
        split: x, from `split_rows`.
        weight: uint16 [n_out, n_in], the bits of bfloat16.
        first, last: at least BLOCK_OUTPUTS outputs. Where they are no multiple of that, the last
            block begins earlier, and gives some outputs twice, the same both times.
    """
    n, n_in = len(out), weight.shape[1]
    sums = np.empty((BLOCK_OUTPUTS, 2 * ROWS_OF_TILE), np.float32)
    stride = np.int64(2 * n_in)
    for block in range(first, last, BLOCK_OUTPUTS):
        begin = min(block, last - BLOCK_OUTPUTS)
        for group in range(len(split)):
            x, at = _address(split[group]), _address(weight) + begin * stride
            _clear_sums()
            for _ in range(n_in // TILE_INPUTS):
                _add_products(x, at, stride)
                x += _TILE_BYTES
                at += TILE_ROW_BYTES
            _store_sums(_address(sums))
            row = group * ROWS_OF_TILE
            for r in range(min(ROWS_OF_TILE, n - row)):
                to = out[row + r]
                for o in range(BLOCK_OUTPUTS):
                    to[begin + o] = scale[begin + o] * (sums[o, 2 * r] + sums[o, 2 * r + 1])
