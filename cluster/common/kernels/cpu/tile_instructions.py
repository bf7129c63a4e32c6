"""Intel's AMX instructions for bfloat16 and int8, as LLVM for numba's intrinsics.

A kernel calls `begin_tiles` first and `end_tiles` last, both on the calling thread, which owns the
tile registers between them. Compiled only where `has_bfloat16_tiles`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cluster.common.kernels.cpu.tile_registers import TILE_ROW_BYTES

BYTE, WORD = ir.IntType(8), ir.IntType(64)
ROW_BYTES = ir.Constant(WORD, TILE_ROW_BYTES)  # the stride of a contiguous tile
_POINTER = BYTE.as_pointer()

_intrinsic: Any = intrinsic


def offset(builder: Any, address: Any, n_bytes: int) -> Any:
    return builder.add(address, ir.Constant(WORD, n_bytes))


def clear_tile(builder: Any, tile: int) -> None:
    _emit(builder, "tilezero", _number(tile))


def load_tile(builder: Any, tile: int, address: Any, stride: Any = ROW_BYTES) -> None:
    """Load 16 rows of 64 bytes; `stride` is the number of bytes between their starts."""
    _emit(builder, "tileloadd64", _number(tile), builder.inttoptr(address, _POINTER), stride)


def store_tile(builder: Any, tile: int, address: Any) -> None:
    pointer = builder.inttoptr(address, _POINTER)
    _emit(builder, "tilestored64", _number(tile), pointer, ROW_BYTES)


def multiply_tiles(builder: Any, sums: int, left: int, right: int) -> None:
    """sums [16, 16] float32 += left [16, 32] @ right [32, 16], both bfloat16.

    A row of `right` has two inputs of each column, one after the other.
    """
    _emit(builder, "tdpbf16ps", _number(sums), _number(left), _number(right))


def multiply_int8_tiles(builder: Any, sums: int, left: int, right: int) -> None:
    """sums [16, 16] int32 += left [16, 64] @ right [64, 16], both int8.

    A row of `right` has four inputs of each column, one after the other.
    """
    _emit(builder, "tdpbssd", _number(sums), _number(left), _number(right))


def procedure(write: Any, n_addresses: int) -> Any:
    """Return type and code of an intrinsic that takes addresses (int64) and returns nothing."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        write(builder, *args)
        return context.get_dummy_value()

    return types.none(*[types.int64] * n_addresses), generate


@_intrinsic  # type: ignore[untyped-decorator]
def address(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, WORD)

    return types.int64(array), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _configure(_context: Any, _config: Any) -> Any:
    def write(builder: Any, config: Any) -> None:
        _emit(builder, "ldtilecfg", builder.inttoptr(config, _POINTER))

    return procedure(write, 1)


@_intrinsic  # type: ignore[untyped-decorator]
def end_tiles(_context: Any) -> Any:
    """Release the thread's tiles, so that the system need not save them."""
    return procedure(lambda builder: _emit(builder, "tilerelease"), 0)


@njit(nogil=True, cache=True)
def begin_tiles(config: Any) -> None:
    _configure(address(config))


def _number(tile: int) -> Any:
    return ir.Constant(BYTE, tile)


def _emit(builder: Any, name: str, *args: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), signature), args)
