"""Attention of one query over keys and values in bfloat16 or float8, by AVX-512. Imports numba.

Vectors hold the numbers at even or at odd places: queries are laid out like that, and sums put in
order at the end. Positions far apart are read at once, since a CPU prefetches each such stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from cluster.common.kernels.cpu import vectors
from cluster.common.kernels.cpu.arithmetic import FLOAT8_UNIT
from cluster.common.kernels.cpu.tile_instructions import address, offset
from decoder_worker.cpu.arrays import HEAD_DIM

AHEAD_BYTES = 768
AT_ONCE = 8  # positions, a multiple of 4
_LANES = vectors.LANES
_PARTS = HEAD_DIM // _LANES  # of a head's numbers: even and odd ones of each half
_PART_BYTES = 4 * _LANES
_LINE_BYTES = 64  # of the cache, and of a vector
_FLOAT = ir.FloatType()

_intrinsic: Any = intrinsic


def fits_vectors(stored: Any) -> bool:
    has_them = binding.get_host_cpu_features().get("avx512f", False)
    return bool(has_them) and stored in (np.uint16, types.uint16, np.uint8, types.uint8)


@_intrinsic  # type: ignore[untyped-decorator]
def _dot(_context: Any, _query: Any, _key: Any, like: Any) -> Any:
    """query . key. query: address of float32 [_PARTS, 16]; key: of HEAD_DIM numbers like `like`."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        query, key, _like = args
        return vectors.lanes_sum(builder, _products(builder, _loaded(builder, query), key, like))

    return types.float32(types.int64, types.int64, like), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _dots(
    _context: Any, _query: Any, _key: Any, _stride: Any, _scores: Any, _apart: Any, like: Any
) -> Any:
    """Like `_dot`, of `AT_ONCE` keys `_stride` bytes apart; the scores are `_apart` bytes apart."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        query, key, stride, scores, apart, _like = args
        asked, summands = _loaded(builder, query), []
        for _position in range(AT_ONCE):
            summands.append(_products(builder, asked, key, like))
            key = builder.add(key, stride)
        for begin in range(0, AT_ONCE, 4):
            sums = vectors.four_sums(builder, summands[begin : begin + 4])
            for position in range(4):
                one = builder.extract_element(sums, ir.Constant(ir.IntType(32), position))
                builder.store(one, builder.inttoptr(scores, _FLOAT.as_pointer()))
                scores = builder.add(scores, apart)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, like), generate


def _loaded(builder: Any, query: Any) -> list[Any]:
    return [vectors.load(builder, offset(builder, query, n * _PART_BYTES)) for n in range(_PARTS)]


def _products(builder: Any, asked: list[Any], key: Any, like: Any) -> Any:
    """A vector whose lanes sum up to query . key."""
    sums = [vectors.constant(0.0)] * 2
    for part, numbers in enumerate(_parts(builder, key, like)):
        sums[part % 2] = vectors.multiply_add(builder, asked[part], numbers, sums[part % 2])
    return builder.fadd(*sums)


def _adder(n_positions: int) -> Any:
    """An intrinsic that adds weights times values of a head, at so many positions, to mixed.

    Its arguments: the addresses of mixed, float32 [_PARTS, 16], and of the first position's
    HEAD_DIM values; the bytes between positions; the address of the first weight, float32; the
    bytes between weights; and a number like the values.
    """

    @_intrinsic  # type: ignore[untyped-decorator]
    def add(
        _context: Any,
        _mixed: Any,
        _value: Any,
        _stride: Any,
        _weights: Any,
        _apart: Any,
        like: Any,
    ) -> Any:
        def write(
            builder: Any, mixed: Any, value: Any, stride: Any, weights: Any, apart: Any
        ) -> None:
            places = [offset(builder, mixed, part * _PART_BYTES) for part in range(_PARTS)]
            sums = [vectors.load(builder, place) for place in places]
            for _position in range(n_positions):
                at = builder.inttoptr(weights, _FLOAT.as_pointer())
                weights = builder.add(weights, apart)
                weight = vectors.everywhere(builder, builder.load(at))
                for part, numbers in enumerate(_parts(builder, value, like)):
                    sums[part] = vectors.multiply_add(builder, numbers, weight, sums[part])
                value = builder.add(value, stride)
            for place, summed in zip(places, sums, strict=True):
                vectors.store(builder, summed, place)

        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            write(builder, *args[:-1])
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5, like), generate

    return add


_add_value, _add_values = _adder(1), _adder(AT_ONCE)


def _parts(builder: Any, numbers: Any, like: Any) -> list[Any]:
    """HEAD_DIM numbers from an address as float32 vectors; prefetches numbers ahead of them."""
    found: list[Any] = []
    for first in range(0, HEAD_DIM * like.bitwidth // 8, _LINE_BYTES):
        at = offset(builder, numbers, first)
        vectors.prefetch(builder, offset(builder, at, AHEAD_BYTES))
        read = vectors.float8_halves if like.bitwidth == 8 else vectors.bfloat16_halves
        found += read(builder, at)
    return found


@njit(nogil=True, cache=True)
def lay_out_query(query: Any, scale: Any, keys: Any, laid_out: Any) -> None:
    scale *= _unit(keys)
    for h in range(len(laid_out)):
        row = laid_out[h].reshape(_PARTS // 2, 2, _LANES)
        for half in range(_PARTS // 2):
            first = h * HEAD_DIM + half * 2 * _LANES
            for lane in range(_LANES):
                row[half, 0, lane] = query[first + 2 * lane] * scale
                row[half, 1, lane] = query[first + 2 * lane + 1] * scale


@njit(nogil=True, cache=True)
def scores_of(laid_out: Any, keys: Any, first: Any, last: Any, scores: Any) -> None:
    n_head, query, n, like = len(scores), address(laid_out), last - first, keys[first, 0, 0]
    head_bytes = HEAD_DIM * keys.itemsize
    stride, spaced = np.int64(n_head * head_bytes), n // AT_ONCE
    key, score = address(keys) + first * stride, address(scores)
    for _ in range(spaced):
        for h in range(n_head):
            to, at = score + 4 * h * scores.shape[1], key + h * head_bytes
            _dots(query + 4 * HEAD_DIM * h, at, spaced * stride, to, 4 * spaced, like)
        key += stride
        score += 4
    key += (AT_ONCE - 1) * spaced * stride
    for i in range(AT_ONCE * spaced, n):
        for h in range(n_head):
            scores[h, i] = _dot(query + 4 * HEAD_DIM * h, key + h * head_bytes, like)
        key += stride


@njit(nogil=True, cache=True)
def mix_values(weights: Any, values: Any, first: Any, last: Any, mixed: Any) -> None:
    n_head, n, like = len(mixed), last - first, values[first, 0, 0]
    head_bytes = HEAD_DIM * values.itemsize
    sums = np.zeros((n_head, HEAD_DIM), np.float32)
    summed, stride, spaced = address(sums), np.int64(n_head * head_bytes), n // AT_ONCE
    value, weight, row = address(values) + first * stride, address(weights), 4 * weights.shape[1]
    for _ in range(spaced):
        for h in range(n_head):
            to, at = summed + 4 * HEAD_DIM * h, value + head_bytes * h
            _add_values(to, at, spaced * stride, weight + row * h, 4 * spaced, like)
        value += stride
        weight += 4
    value += (AT_ONCE - 1) * spaced * stride
    weight += 4 * (AT_ONCE - 1) * spaced
    for _ in range(AT_ONCE * spaced, n):
        for h in range(n_head):
            to, at = summed + 4 * HEAD_DIM * h, value + head_bytes * h
            _add_value(to, at, 0, weight + row * h, 0, like)
        value += stride
        weight += 4
    _in_order(sums, _unit(values), mixed)


@njit(nogil=True, cache=True)
def _unit(stored: Any) -> Any:
    """The factor by which numbers are larger than `_parts` gives them."""
    return FLOAT8_UNIT if stored.itemsize == 1 else np.float32(1)


@njit(nogil=True, cache=True)
def _in_order(sums: Any, unit: Any, mixed: Any) -> None:
    """Write sums, by even and odd numbers, times the unit in order to mixed [H, HEAD_DIM]."""
    for h in range(len(mixed)):
        row = sums[h].reshape(_PARTS // 2, 2, _LANES)
        for half in range(_PARTS // 2):
            first = half * 2 * _LANES
            for lane in range(_LANES):
                mixed[h, first + 2 * lane] = row[half, 0, lane] * unit
                mixed[h, first + 2 * lane + 1] = row[half, 1, lane] * unit
