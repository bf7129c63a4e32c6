"""Functions that numba inlines into kernels: conversions of bfloat16 and float8, exp2 and erf."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int32, njit, types, uint16, uint32
from numba.extending import intrinsic, overload

_intrinsic: Any = intrinsic
LOG2_E = np.float32(1.4426950408889634)
FLOAT8_UNIT = np.float32(256)  # a float8_e4m3fn's exponent has a bias of 7, a float16's one of 15


@intrinsic
def as_float(_context: Any, _bits: Any) -> Any:
    def bitcast(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), bitcast


@intrinsic
def as_bits(_context: Any, _number: Any) -> Any:
    def bitcast(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), bitcast


@intrinsic
def half_number(_context: Any, _bits: Any) -> Any:
    def extend(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), extend


@njit(inline="always")
def _half_bits(float8: Any) -> Any:
    """Return the bits of the float16 whose value is the float8's divided by `FLOAT8_UNIT`."""
    upper = uint16(float8) << uint16(8)
    return uint16((upper & uint16(0x8000)) | ((upper & uint16(0x7FFF)) >> uint16(1)))


def number(stored: Any) -> Any:
    """Convert a stored element to float32: uint16 has the bits of a bfloat16, int8 an integer, and
    uint8 the bits of a float8_e4m3fn that is not NaN.
    """
    raise NotImplementedError("only inside a kernel")


@overload(number, inline="always")
def _number(stored):
    if stored == types.uint16:
        return lambda stored: as_float(uint32(stored) << uint32(16))
    if stored == types.int8:
        return lambda stored: np.float32(stored)
    if stored == types.uint8:
        return lambda stored: half_number(_half_bits(stored)) * FLOAT8_UNIT
    return lambda stored: stored


@njit(inline="always")
def bfloat16_bits(x: Any) -> Any:
    """Round a finite float32 to bfloat16 (ties away from zero), as uint16."""
    return uint16((as_bits(x) + uint32(0x8000)) >> uint32(16))


@njit(inline="always")
def nearest_bfloat16(x: Any) -> Any:
    """Round a finite float32 to bfloat16 as torch does (ties to even), as float32."""
    bits = as_bits(x)
    odd = (bits >> uint32(16)) & uint32(1)
    return as_float(uint32((bits + uint32(0x7FFF) + odd) & uint32(0xFFFF0000)))


def stored(x: Any, like: Any) -> Any:
    """Convert float32 `x` to the type of `like`; uint16 takes the bits of a bfloat16."""
    raise NotImplementedError("only inside a kernel")


@overload(stored, inline="always")
def _stored(x, like):
    if like == types.uint16:
        return lambda x, like: bfloat16_bits(x)
    return lambda x, like: x


@_intrinsic  # type: ignore[untyped-decorator]
def larger(_context: Any, _x: Any, _y: Any) -> Any:
    """Return the larger of two float32, neither NaN. LLVM does not vectorise loops with `max`."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.FloatType()
        signature = ir.FunctionType(kind, [kind, kind])
        function = builder.module.declare_intrinsic("llvm.maxnum", (kind,), signature)
        return builder.call(function, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), generate


@intrinsic
def _nearest_whole(_context: Any, _x: Any) -> Any:
    # One instruction, unlike a conversion to an integer that chooses how to round.
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", (ir.FloatType(),)), args)

    return types.float32(types.float32), generate


@njit(inline="always", fastmath=True)
def exp2(x: Any) -> Any:
    """Return 2 ** x for x <= 0 within 2e-7, float32. Below -125 it is less than 3e-38."""
    x = max(x, np.float32(-126.0))
    whole = _nearest_whole(x)
    part = x - whole  # -0.5..0.5
    # The polynomial of degree 5 with 1 at 0 whose largest relative error is least (9e-8).
    p = np.float32(0.0013264727)
    p = p * part + np.float32(0.009671513)
    p = p * part + np.float32(0.055507336)
    p = p * part + np.float32(0.24022242)
    p = p * part + np.float32(0.693147)
    p = p * part + np.float32(1.0)
    return p * as_float(uint32((int32(whole) + int32(127)) << int32(23)))


@njit(inline="always", fastmath=True)
def erf(x: Any) -> Any:
    """Return the error function within 6e-7; float32 (Abramowitz and Stegun, formula 7.1.26)."""
    size = abs(x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * size)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    y = np.float32(1) - p * t * exp2(-size * size * np.float32(LOG2_E))
    return y if x >= np.float32(0) else -y
