"""Some queries over all keys of a window by the CPU's bfloat16 tiles, on the calling thread.

Of 32 queries at a time all scores are computed, as float32, then their powers, then the sums of
values: of a head of 1500 keys this is 0.5 MB, which stays in a core's cache with the keys. Scores
have a row for each key and a column for each query, so that the highest of a query, and its sum,
are taken by lanes of a vector; and a pair of rows of powers, as bfloat16, is a row of a tile.

Imports numba, and compiles only where `cluster.jit.tile_registers.has_bfloat16_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cluster.jit import vectors
from cluster.jit.arithmetic import bfloat16_bits
from cluster.jit.tile_instructions import (
    WORD,
    address,
    begin_tiles,
    clear_tile,
    end_tiles,
    load_tile,
    multiply_tiles,
    offset,
    procedure,
    store_tile,
)
from cluster.jit.tile_registers import (
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
)

HEAD_DIM = 64  # of every published checkpoint
GROUPS = 2  # of queries, a tile's columns each, whose scores are computed at a time
KEYS = TILE_INPUTS  # how many keys are mixed at a time: memory holds a multiple of them
_ROWS_AT_ONCE = 4  # of scores, when powers are taken
_LOWEST = np.float32(-3.0e38)

_intrinsic: Any = intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def _load_queries(_context: Any, _queries: Any) -> Any:
    """To tiles 4..7: of each group the first and the second half of its inputs."""

    def write(builder: Any, queries: Any) -> None:
        for tile in range(4):
            load_tile(builder, 4 + tile, offset(builder, queries, tile * TILE_BYTES))

    return procedure(write, 1)


@_intrinsic  # type: ignore[untyped-decorator]
def _score(_context: Any, _keys: Any, _scores: Any, _group: Any) -> Any:
    """Scores of 16 keys and the loaded queries, float32 [16, 16] of each group.

    keys: address of their rows; scores: of the first group's; group: bytes to the second one's.
    """

    def write(builder: Any, keys: Any, scores: Any, group: Any) -> None:
        row = ir.Constant(WORD, 2 * HEAD_DIM)
        first, second, first_half, second_half = range(4)
        clear_tile(builder, first)
        clear_tile(builder, second)
        load_tile(builder, first_half, keys, row)
        load_tile(builder, second_half, offset(builder, keys, TILE_ROW_BYTES), row)
        multiply_tiles(builder, first, first_half, 4)
        multiply_tiles(builder, second, first_half, 6)
        multiply_tiles(builder, first, second_half, 5)
        multiply_tiles(builder, second, second_half, 7)
        store_tile(builder, first, scores)
        store_tile(builder, second, builder.add(scores, group))

    return procedure(write, 3)


@_intrinsic  # type: ignore[untyped-decorator]
def _raise_highest(_context: Any, _highest: Any, _scores: Any) -> Any:
    """highest, float32 [16], becomes the highest of itself and of 16 rows of scores."""

    def write(builder: Any, highest: Any, scores: Any) -> None:
        rows = [
            vectors.load(builder, offset(builder, scores, row * TILE_ROW_BYTES))
            for row in range(TILE_ROWS)
        ]
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [vectors.greater(builder, x, y) for x, y in pairs]
        top = vectors.greater(builder, rows[0], vectors.load(builder, highest))
        vectors.store(builder, top, highest)

    return procedure(write, 2)


@_intrinsic  # type: ignore[untyped-decorator]
def _powers(
    _context: Any, _scores: Any, _powers: Any, _highest: Any, _total: Any, _scale: Any
) -> Any:
    """2 ** (scale * score - highest) of a few keys' rows, as pairs of bfloat16, and to the total.

    scores: address of float32 [_ROWS_AT_ONCE, 16]; powers: of uint32 [_ROWS_AT_ONCE / 2, 16];
    highest, total: of float32 [16], the highest times the scale.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        scores, powers, highest, total, scale = args
        top = builder.fneg(vectors.load(builder, highest))
        scales, found = vectors.everywhere(builder, scale), []
        for row in range(_ROWS_AT_ONCE):
            score = vectors.load(builder, offset(builder, scores, row * TILE_ROW_BYTES))
            exponent = vectors.multiply_add(builder, score, scales, top)
            found.append(vectors.exp2(builder, exponent))
        summed = vectors.load(builder, total)
        for pair in range(_ROWS_AT_ONCE // 2):
            first, second = found[2 * pair], found[2 * pair + 1]
            summed = builder.fadd(summed, builder.fadd(first, second))
            both = vectors.bfloat16_pairs(builder, first, second)
            vectors.store(builder, both, offset(builder, powers, pair * TILE_ROW_BYTES))
        vectors.store(builder, summed, total)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4, types.float32), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _clear_mixed(_context: Any) -> Any:
    def write(builder: Any) -> None:
        for tile in range(4):
            clear_tile(builder, tile)

    return procedure(write, 0)


@_intrinsic  # type: ignore[untyped-decorator]
def _mix(_context: Any, _values: Any, _stride: Any, _powers: Any, _group: Any) -> Any:
    """Add 32 of a head's dimensions, of KEYS keys, times both groups' powers.

    values: address of the first dimension's row, stride: bytes to the next one; powers: of the
    first group's, group: bytes to the second one's.
    """

    def write(builder: Any, values: Any, stride: Any, powers: Any, group: Any) -> None:
        first, second = 6, 7
        load_tile(builder, first, powers)
        load_tile(builder, second, builder.add(powers, group))
        for half in range(2):
            load_tile(builder, 4 + half, values, stride)
            multiply_tiles(builder, 2 * half, 4 + half, first)
            multiply_tiles(builder, 2 * half + 1, 4 + half, second)
            values = builder.add(values, builder.mul(stride, ir.Constant(WORD, TILE_ROWS)))

    return procedure(write, 4)


@_intrinsic  # type: ignore[untyped-decorator]
def _store_mixed(_context: Any, _mixed: Any, _group: Any) -> Any:
    """To float32 [32, 16] of each group; group: bytes to the second one's."""

    def write(builder: Any, mixed: Any, group: Any) -> None:
        for half in range(2):
            to = offset(builder, mixed, half * TILE_BYTES)
            store_tile(builder, 2 * half, to)
            store_tile(builder, 2 * half + 1, builder.add(to, group))

    return procedure(write, 2)


@njit(nogil=True, cache=True)
def _lay_out_queries(q: Any, first: Any, queries: Any) -> None:
    """Rows of q uint32 [n, HEAD_DIM / 2] from one on, as [GROUPS, HEAD_DIM / 2, 16]; or zeros."""
    for group in range(GROUPS):
        for column in range(TILE_ROWS):
            row = first + TILE_ROWS * group + column
            for pair in range(HEAD_DIM // 2):
                queries[group, pair, column] = q[row, pair] if row < len(q) else np.uint32(0)


@njit(nogil=True, cache=True)
def _scores_of(keys: Any, n_keys: Any, queries: Any, scores: Any, highest: Any) -> None:
    """scores [GROUPS, T, 16] of keys [T, HEAD_DIM], and the highest; none behind n_keys count."""
    room = scores.shape[1]
    from_keys, to, top = address(keys), address(scores), address(highest)
    group = np.int64(room * TILE_ROW_BYTES)
    _load_queries(address(queries))
    highest[:] = _LOWEST
    for key in range(0, room, TILE_ROWS):
        at = to + key * TILE_ROW_BYTES
        _score(from_keys + key * (2 * HEAD_DIM), at, group)
        if key + TILE_ROWS > n_keys:
            scores[:, max(key, n_keys) : key + TILE_ROWS] = _LOWEST
        _raise_highest(top, at)
        _raise_highest(top + TILE_ROW_BYTES, at + group)


@njit(nogil=True, cache=True)
def _powers_of(scores: Any, scale: Any, highest: Any, powers: Any, total: Any) -> None:
    """powers uint32 [GROUPS, T / 2, 16] and their sums, total [GROUPS, 16]."""
    highest *= scale
    total[:] = np.float32(0)
    for group in range(GROUPS):
        at, to = address(scores[group]), address(powers[group])
        top, summed = address(highest[group]), address(total[group])
        for _ in range(0, scores.shape[1], _ROWS_AT_ONCE):
            _powers(at, to, top, summed, scale)
            at += _ROWS_AT_ONCE * TILE_ROW_BYTES
            to += _ROWS_AT_ONCE // 2 * TILE_ROW_BYTES


@njit(nogil=True, cache=True)
def _mix_values(values: Any, powers: Any, mixed: Any) -> None:
    """mixed [GROUPS, HEAD_DIM, 16] of values [HEAD_DIM, T]."""
    stride, group = np.int64(2 * values.shape[1]), np.int64(powers[0].size * 4)
    for half in range(2):
        _clear_mixed()
        at, weights = address(values) + half * 2 * TILE_ROWS * stride, address(powers)
        for _ in range(0, values.shape[1], KEYS):
            _mix(at, stride, weights, group)
            at += TILE_ROW_BYTES
            weights += TILE_BYTES
        _store_mixed(address(mixed) + half * 2 * TILE_BYTES, np.int64(4 * TILE_BYTES))


@njit(nogil=True, cache=True)
def _write(mixed: Any, total: Any, first: Any, begin: Any, out: Any) -> None:
    """Queries from `first` on to columns from `begin` on of out, divided by their powers' sums."""
    for group in range(GROUPS):
        for column in range(TILE_ROWS):
            row = first + TILE_ROWS * group + column
            if row < len(out):
                inverse = np.float32(1) / total[group, column]
                for c in range(HEAD_DIM):
                    out[row, begin + c] = bfloat16_bits(mixed[group, c, column] * inverse)


@njit(nogil=True, cache=True)
def attend(
    q: Any, k: Any, v: Any, n_keys: Any, scale: Any, config: Any, scores: Any, powers: Any, out: Any
) -> None:
    """out [n, H * HEAD_DIM] = softmax(scale * ln 2 * q k) v, of bfloat16's bits.

    Args:
        q: uint32 [H, n, HEAD_DIM / 2], two inputs in one.
        k, v: uint16 [H, T, HEAD_DIM] and [H, HEAD_DIM, T]; T is a multiple of KEYS. Behind n_keys
            the keys may be anything, and the values must be numbers.
        scale: float32.
        config: `tile_config()`.
        scores, powers: for what is between, float32 [GROUPS, T, 16], uint32 [GROUPS, T / 2, 16].
    """
    queries = np.empty((GROUPS, HEAD_DIM // 2, TILE_ROWS), np.uint32)
    highest, total = np.empty((2, GROUPS, TILE_ROWS), np.float32)
    mixed = np.empty((GROUPS, HEAD_DIM, TILE_ROWS), np.float32)
    begin_tiles(config)
    for h in range(len(q)):
        for first in range(0, q.shape[1], GROUPS * TILE_ROWS):
            _lay_out_queries(q[h], first, queries)
            _scores_of(k[h], n_keys, queries, scores, highest)
            _powers_of(scores, scale, highest, powers, total)
            _mix_values(v[h], powers, mixed)
            _write(mixed, total, first, h * HEAD_DIM, out)
    end_tiles()
