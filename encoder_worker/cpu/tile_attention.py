"""Attention of some queries to all keys of a window by bfloat16 tiles, on the calling thread.

16 queries at a time go through the keys in blocks of 32. One turn scores the next block, takes the
powers of this one, and mixes the values of the block before, so that tiles and vectors compute side
by side and all stays in the nearest cache. Scores are float32 [KEYS, QUERIES], so that sums are
taken by lanes; powers are pairs of bfloat16, uint32 [KEYS / 2, QUERIES], the rows of a tile.

A power is 2 to the score less the highest of the first block. Later scores may be higher, as
float32 and bfloat16 reach 2 ** 127. If sums become too large all the same, the queries go through
the keys again with the highest score of all.

Intrinsics take addresses as int64. Imports numba, and compiles only where
`common.kernels.cpu.tile_registers.has_bfloat16_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cluster.common.kernels.cpu import vectors
from cluster.common.kernels.cpu.tile_instructions import (
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
from cluster.common.kernels.cpu.tile_registers import (
    HEAD_DIM,
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_ROWS,
)

QUERIES = TILE_ROWS  # computed at a time
KEYS = TILE_INPUTS  # of a block; k and v hold a multiple of them
PAIRS = HEAD_DIM // 2  # of bfloat16 in a query
KEY_BYTES = 2 * HEAD_DIM
_ROWS_AT_ONCE = 4  # whose powers are computed together
_BLOCK_BYTES, _SCORES_BYTES = KEYS * KEY_BYTES, KEYS * TILE_ROW_BYTES
_LOWEST = np.float32(-3.0e38)
_MOST = np.float32(2.0**100)  # of a sum of powers; below it none of them was too large

# Tile registers: sums of mixed values, two halves of the queries, and two that hold by turns scores
# and keys, or powers and values.
_N_MIXED = HEAD_DIM // TILE_ROWS
_HALVES = (_N_MIXED, _N_MIXED + 1)
_SCORES, _READ = _N_MIXED + 2, _N_MIXED + 3
_POWERS = _SCORES

_intrinsic: Any = intrinsic
_Write = Callable[[], None]  # emits one or more instructions


def _score_writes(builder: Any, keys: Any, scores: Any) -> list[_Write]:
    """Score a block of keys with the loaded queries, to float32 [KEYS, QUERIES]."""
    writes: list[_Write] = []
    for tile in range(KEYS // TILE_ROWS):
        writes.append(partial(clear_tile, builder, _SCORES))
        for half, queries in enumerate(_HALVES):
            first = tile * TILE_ROWS * KEY_BYTES + half * TILE_ROW_BYTES
            row, at = ir.Constant(WORD, KEY_BYTES), offset(builder, keys, first)
            writes.append(partial(load_tile, builder, _READ, at, row))
            writes.append(partial(multiply_tiles, builder, _SCORES, _READ, queries))
        to = offset(builder, scores, tile * TILE_BYTES)
        writes.append(partial(store_tile, builder, _SCORES, to))
    return writes


def _mix_writes(builder: Any, values: Any, stride: Any, powers: Any) -> list[_Write]:
    """Add a block's values times their powers; stride: bytes between rows of values."""
    writes: list[_Write] = [partial(load_tile, builder, _POWERS, powers)]
    for tile in range(_N_MIXED):
        at = builder.add(values, builder.mul(stride, ir.Constant(WORD, tile * TILE_ROWS)))
        writes.append(partial(load_tile, builder, _READ, at, stride))
        writes.append(partial(multiply_tiles, builder, tile, _READ, _POWERS))
    return writes


def _write_powers(
    builder: Any, scores: Any, powers: Any, highest: Any, scale: Any, row: int
) -> list[Any]:
    """Store the powers of a few rows as pairs of bfloat16; returns the sums of pairs."""
    found = []
    for key in range(row, row + _ROWS_AT_ONCE):
        score = vectors.load(builder, offset(builder, scores, key * TILE_ROW_BYTES))
        exponent = vectors.multiply_add(builder, score, scale, builder.fneg(highest))
        found.append(vectors.exp2(builder, exponent))
    pairs = list(zip(found[::2], found[1::2], strict=True))
    for pair, (first, second) in enumerate(pairs, row // 2):
        both = vectors.bfloat16_pairs(builder, first, second)
        vectors.store(builder, both, offset(builder, powers, pair * TILE_ROW_BYTES))
    return [builder.fadd(first, second) for first, second in pairs]


@_intrinsic  # type: ignore[untyped-decorator]
def begin_queries(_context: Any, _queries: Any) -> Any:
    """Load queries, uint32 [PAIRS, QUERIES], and zero the sums of mixed values."""

    def write(builder: Any, queries: Any) -> None:
        for half, tile in enumerate(_HALVES):
            load_tile(builder, tile, offset(builder, queries, half * TILE_BYTES))
        for tile in range(_N_MIXED):
            clear_tile(builder, tile)

    return procedure(write, 1)


@_intrinsic  # type: ignore[untyped-decorator]
def score_block(_context: Any, _keys: Any, _scores: Any) -> Any:

    def write(builder: Any, keys: Any, scores: Any) -> None:
        for each in _score_writes(builder, keys, scores):
            each()

    return procedure(write, 2)


@_intrinsic  # type: ignore[untyped-decorator]
def raise_highest(_context: Any, _highest: Any, _scores: Any) -> Any:
    """Raise highest, float32 [QUERIES], to the maximum of itself and a block's scores."""

    def write(builder: Any, highest: Any, scores: Any) -> None:
        rows = [
            vectors.load(builder, offset(builder, scores, row * TILE_ROW_BYTES))
            for row in range(KEYS)
        ]
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [vectors.greater(builder, x, y) for x, y in pairs]
        top = vectors.greater(builder, rows[0], vectors.load(builder, highest))
        vectors.store(builder, top, highest)

    return procedure(write, 2)


@_intrinsic  # type: ignore[untyped-decorator]
def take_turn(
    _context: Any,
    _next_keys: Any,
    _next_scores: Any,
    _scores: Any,
    _powers: Any,
    _last_powers: Any,
    _last_values: Any,
    _stride: Any,
    _highest: Any,
    _total: Any,
    _scale: Any,
) -> Any:
    """Score the next block, take the powers of this one, and mix the last one's values.

    scale is float32, stride the bytes between rows of values, all others are addresses. highest and
    total: of float32 [QUERIES]; highest is already multiplied by the scale.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        keys, next_scores, scores, powers, last_powers, values, stride, top, total, scale = args
        tiles = _score_writes(builder, keys, next_scores)
        tiles += _mix_writes(builder, values, stride, last_powers)
        highest, scales = vectors.load(builder, top), vectors.everywhere(builder, scale)
        sums, n_turns = [], KEYS // _ROWS_AT_ONCE
        for turn in range(n_turns):
            row = turn * _ROWS_AT_ONCE
            sums += _write_powers(builder, scores, powers, highest, scales, row)
            for write in tiles[turn * len(tiles) // n_turns : (turn + 1) * len(tiles) // n_turns]:
                write()
        while len(sums) > 1:
            sums = [builder.fadd(x, y) for x, y in zip(sums[::2], sums[1::2], strict=True)]
        vectors.store(builder, builder.fadd(vectors.load(builder, total), sums[0]), total)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 9, types.float32), generate


@_intrinsic  # type: ignore[untyped-decorator]
def end_queries(_context: Any, _values: Any, _stride: Any, _powers: Any, _mixed: Any) -> Any:
    """Mix the last block's values, and store all sums as float32 [HEAD_DIM, QUERIES]."""

    def write(builder: Any, values: Any, stride: Any, powers: Any, mixed: Any) -> None:
        for each in _mix_writes(builder, values, stride, powers):
            each()
        for tile in range(_N_MIXED):
            store_tile(builder, tile, offset(builder, mixed, tile * TILE_BYTES))

    return procedure(write, 4)


@_intrinsic  # type: ignore[untyped-decorator]
def pair_up(_context: Any, _mixed: Any, _inverse: Any, _pairs: Any) -> Any:
    """Store mixed * inverse (float32 [QUERIES]) as pairs, uint32 [PAIRS, QUERIES]."""

    def write(builder: Any, mixed: Any, inverse: Any, pairs: Any) -> None:
        by = vectors.load(builder, inverse)
        rows = [
            builder.fmul(vectors.load(builder, offset(builder, mixed, row * TILE_ROW_BYTES)), by)
            for row in range(HEAD_DIM)
        ]
        for pair in range(PAIRS):
            both = vectors.bfloat16_pairs(builder, rows[2 * pair], rows[2 * pair + 1])
            vectors.store(builder, both, offset(builder, pairs, pair * TILE_ROW_BYTES))

    return procedure(write, 3)


@njit(nogil=True, cache=True)
def _lay_out_queries(q: Any, first: Any, queries: Any) -> None:
    """Rows of q uint32 [n, PAIRS] from `first` on to [PAIRS, QUERIES], zero-padded."""
    n = min(QUERIES, len(q) - first)
    queries[:, n:] = np.uint32(0)
    for column in range(n):
        row = q[first + column]
        for pair in range(PAIRS):
            queries[pair, column] = row[pair]


@njit(nogil=True, cache=True)
def _leave_out(block: Any, n_keys: Any, scores: Any, place: Any) -> None:
    """Exclude keys from n_keys on from the scores [place] of a block."""
    if (block + 1) * KEYS > n_keys:
        scores[place, max(0, n_keys - block * KEYS) :] = _LOWEST


@njit(nogil=True, cache=True)
def _find_highest(keys: Any, n_blocks: Any, n_keys: Any, scores: Any, highest: Any) -> None:
    """Highest scores in n_blocks blocks; scores[0] keeps those of the first block."""
    highest[:] = _LOWEST
    for block in range(n_blocks - 1, -1, -1):
        score_block(keys + block * _BLOCK_BYTES, address(scores))
        _leave_out(block, n_keys, scores, 0)
        raise_highest(address(highest), address(scores))


@njit(nogil=True, cache=True)
def _mix(k: Any, v: Any, n_keys: Any, scale: Any, memory: Any) -> None:
    """Go through all blocks for the loaded queries, after `_find_highest`."""
    scores, powers, highest, total, mixed = memory  # as `attend` makes it
    # Addresses are taken once, as arrays would be reference-counted in each turn.
    keys, values, stride = address(k), address(v), np.int64(2 * v.shape[1])
    at, to, top, sums = address(scores), address(powers), address(highest), address(total)
    last = len(k) // KEYS - 1
    powers[1], total[:] = np.uint32(0), np.float32(0)  # nothing was before the first block
    for block in range(last + 1):
        following, before = min(block + 1, last), max(block - 1, 0)
        now, other = block % 2, (block + 1) % 2
        take_turn(
            keys + following * _BLOCK_BYTES,
            at + other * _SCORES_BYTES,
            at + now * _SCORES_BYTES,
            to + now * TILE_BYTES,
            to + other * TILE_BYTES,
            values + before * TILE_ROW_BYTES,
            stride,
            top,
            sums,
            scale,
        )
        _leave_out(following, n_keys, scores, other)
    end_queries(values + last * TILE_ROW_BYTES, stride, to + last % 2 * TILE_BYTES, address(mixed))


@njit(nogil=True, cache=True)
def _attend_block(queries: Any, k: Any, v: Any, n_keys: Any, scale: Any, memory: Any) -> None:
    """Compute one head's mixed values and sums of powers for laid out queries."""
    scores, _, highest, total, _ = memory
    n_blocks = len(k) // KEYS
    for n_asked in (1, n_blocks):
        begin_queries(address(queries))
        _find_highest(address(k), n_asked, n_keys, scores, highest)
        highest *= scale
        _mix(k, v, n_keys, scale, memory)
        if (total < _MOST).all():
            break


@njit(nogil=True, cache=True)
def attend(q: Any, k: Any, v: Any, n_keys: Any, scale: Any, config: Any, out: Any) -> None:
    """out = softmax(scale * ln 2 * q k) v, uint32 [n, H * HEAD_DIM / 2], pairs of bfloat16.

    Args:
        q: uint32 [H, n, HEAD_DIM / 2], pairs of bfloat16.
        k, v: uint16 [H, T, HEAD_DIM] and [H, HEAD_DIM, T]; T is a multiple of KEYS. Behind n_keys
            keys may be anything, and values must be numbers.
        scale: float32.
        config: `tile_config()`.
    """
    queries, pairs = np.empty((2, PAIRS, QUERIES), np.uint32)
    scores = np.empty((2, KEYS, QUERIES), np.float32)
    powers = np.empty((2, KEYS // 2, QUERIES), np.uint32)
    highest, total = np.empty((2, QUERIES), np.float32)
    mixed = np.empty((HEAD_DIM, QUERIES), np.float32)
    memory = (scores, powers, highest, total, mixed)
    begin_tiles(config)
    for h in range(len(q)):
        columns = out[:, h * PAIRS : (h + 1) * PAIRS]
        for first in range(0, q.shape[1], QUERIES):
            _lay_out_queries(q[h], first, queries)
            _attend_block(queries, k[h], v[h], n_keys, scale, memory)
            highest[:] = np.float32(1) / total  # a temporary would be freed at once
            pair_up(address(mixed), address(highest), address(pairs))
            for column in range(min(QUERIES, len(columns) - first)):
                for pair in range(PAIRS):
                    columns[first + column, pair] = pairs[pair, column]
    end_tiles()
