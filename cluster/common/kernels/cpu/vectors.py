"""Vectors of 16 float32 numbers for AVX-512, twice as wide as numba's own loops take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

LANES = 16
_INT, _POINTER = ir.IntType(32), ir.IntType(8).as_pointer()
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_WORDS, _HALVES = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.HalfType(), 2 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_ALL_LANES, _THIS_ROUNDING = ir.Constant(ir.IntType(16), -1), ir.Constant(_INT, 4)
# The polynomial of degree 4 with 1 at 0 whose largest relative error over -0.5..0.5 is least.
_EXP2 = (0.00958285, 0.05590643, 0.24024099, 0.69312419, 1.0)


def load(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, FLOATS.as_pointer()))
    loaded.align = 4
    return loaded


def load_bfloat16(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, _SHORTS.as_pointer()))
    loaded.align = 2
    wide = builder.zext(loaded, INTS)
    return builder.bitcast(builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)


def store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = 4


def everywhere(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(
        first, ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, [0] * LANES)
    )


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch an address, which need not be mapped."""
    pointer = builder.inttoptr(address, _POINTER)
    args = (pointer, _INT(0), _INT(3), _INT(1))  # to read, soon and often, data
    signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0", (), signature), args)


def bfloat16_halves(builder: Any, address: Any) -> tuple[Any, Any]:
    """Load 32 bfloat16 as two vectors: those at even places, and those at odd ones."""
    pairs = builder.load(builder.inttoptr(address, INTS.as_pointer()))
    pairs.align = 2
    even = builder.shl(pairs, ir.Constant(INTS, [16] * LANES))
    odd = builder.and_(pairs, ir.Constant(INTS, [-0x10000] * LANES))
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def float8_halves(builder: Any, address: Any) -> list[Any]:
    """Load 64 float8_e4m3fn, divided by 256, as four vectors: even and odd places of the first 32,
    then of the last. A shift makes float16 of them, which has one more bit of exponent.
    """
    words = builder.load(builder.inttoptr(address, _WORDS.as_pointer()))
    words.align = 1
    upper = builder.shl(words, ir.Constant(_WORDS, [8] * 2 * LANES))
    found = []
    for bytes_above in (upper, words):
        moved = builder.ashr(bytes_above, ir.Constant(_WORDS, [1] * 2 * LANES))
        kept = builder.and_(moved, ir.Constant(_WORDS, [-0x4080] * 2 * LANES))  # 0xBF80
        found.append(builder.bitcast(kept, _HALVES))
    first, last = range(LANES), range(LANES, 2 * LANES)
    return [_widened(builder, halves, part) for part in (first, last) for halves in found]


def _widened(builder: Any, halves: Any, lanes: Any) -> Any:
    chosen = ir.Constant(INTS, list(lanes))
    part = builder.shuffle_vector(halves, ir.Constant(_HALVES, ir.Undefined), chosen)
    return builder.fpext(part, FLOATS)


def lanes_sum(builder: Any, vector: Any) -> Any:
    number = ir.FloatType()
    signature = ir.FunctionType(number, [number, FLOATS])
    reduce = builder.module.declare_intrinsic("llvm.vector.reduce.fadd.v16f32", (), signature)
    return builder.call(reduce, [ir.Constant(number, 0.0), vector], fastmath=("reassoc",))


def four_sums(builder: Any, summands: Sequence[Any]) -> Any:
    """Sum the lanes of each of four vectors, into a vector of four float32."""
    low = [0, 16, 1, 17]  # of each 4 lanes, from two vectors by turns
    groups = range(0, LANES, 4)
    mixed = [[lane + group for group in groups for lane in low]]
    mixed.append([lane + 2 for lane in mixed[0]])
    pairs = [_added(builder, *summands[first : first + 2], *mixed) for first in (0, 2)]
    low = [0, 1, 16, 17]  # lanes hold vectors 0, 1, 0, 1 and 2, 3, 2, 3
    halves = [[lane + 2 * half + group for group in groups for lane in low] for half in (0, 1)]
    summed = _added(builder, *pairs, *halves)
    width = LANES
    while width > 4:
        width //= 2
        summed = _added(builder, summed, summed, list(range(width)), list(range(width, 2 * width)))
    return summed


def _added(builder: Any, first: Any, second: Any, *lanes: list[int]) -> Any:
    one, other = (
        builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT, len(chosen)), chosen))
        for chosen in lanes
    )
    return builder.fadd(one, other)


def constant(number: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(number))] * LANES)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", x, y, z)


def greater(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def lesser(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def nearest_integer(builder: Any, x: Any) -> Any:
    return _call(builder, "llvm.rint.v16f32", x)


def load_integers(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, INTS.as_pointer()))
    loaded.align = 4
    return builder.sitofp(loaded, FLOATS)


def store_in_8_bits(builder: Any, whole: Any, address: Any) -> None:
    """Store whole numbers of -128 to 127 as int8."""
    narrow = builder.trunc(builder.fptosi(whole, INTS), _BYTES)
    builder.store(narrow, builder.inttoptr(address, _BYTES.as_pointer())).align = 1


def bytes_of(builder: Any, parts: Sequence[Any]) -> Any:
    """Truncate four vectors of float32, from 0 to below 256, to 64 bytes. Lanes 4 n to 4 n + 3 of
    vector i begin at byte 16 n + 4 i.
    """
    whole = [builder.fptosi(part, INTS) for part in parts]
    narrow = []
    for pair in (whole[:2], whole[2:]):
        signature = ir.FunctionType(_WORDS, [INTS] * 2)
        name = "llvm.x86.avx512.packssdw.512"
        narrow.append(builder.call(builder.module.declare_intrinsic(name, (), signature), pair))
    found = ir.VectorType(ir.IntType(8), 4 * LANES)
    signature = ir.FunctionType(found, [_WORDS] * 2)
    name = "llvm.x86.avx512.packuswb.512"
    return builder.call(builder.module.declare_intrinsic(name, (), signature), narrow)


def highest_lane(builder: Any, integers: Any) -> Any:
    signature = ir.FunctionType(_INT, [INTS])
    reduce = builder.module.declare_intrinsic("llvm.vector.reduce.smax.v16i32", (), signature)
    return builder.call(reduce, [integers])


def exp2(builder: Any, x: Any) -> Any:
    """Return 2 ** x within 3e-6; 0 where that is too small, and NaN where x is NaN."""
    whole = nearest_integer(builder, x)
    part = builder.fsub(x, whole)
    power = constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = multiply_add(builder, power, part, constant(coefficient))
    scale = "llvm.x86.avx512.mask.scalef.ps.512"
    return _call(builder, scale, power, whole, power, _ALL_LANES, _THIS_ROUNDING)


def bfloat16_pairs(builder: Any, first: Any, second: Any) -> Any:
    """Round two vectors to bfloat16; a lane has `first` in its low half, `second` in its high."""
    half, upper = ir.Constant(INTS, [0x8000] * LANES), ir.Constant(INTS, [-0x10000] * LANES)
    below = builder.add(builder.bitcast(first, INTS), half)
    above = builder.add(builder.bitcast(second, INTS), half)
    below = builder.lshr(below, ir.Constant(INTS, [16] * LANES))
    return builder.or_(below, builder.and_(above, upper))


def _call(builder: Any, name: str, *args: Any) -> Any:
    signature = ir.FunctionType(FLOATS, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), signature), args)
