"""Some queries over all keys of a window by the CPU's bfloat16 tiles, on the calling thread.

16 queries at a time go through the keys in blocks of 32. One turn multiplies the scores of the next
block, as float32, takes the powers of this one, and mixes the values of the block before: tiles and
vectors compute side by side, and what lies between them stays in the nearest cache. Scores have a
row for each key and a column for each query, so that sums are taken by lanes of a vector; and a
pair of rows of powers, as bfloat16, is a row of a tile.

A power is 2 to the score less the highest of the first block. A later score may be higher: float32
and bfloat16 have room for 2 ** 127, and are as precise there. Where that is not enough, the highest
of all keys is looked for, and the queries go through them once more.

Imports numba, and compiles only where `common.kernels.cpu.tile_registers.has_bfloat16_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.tile_instructions import address, begin_tiles, end_tiles
from cluster.common.kernels.cpu.tile_registers import TILE_BYTES, TILE_ROW_BYTES
from encoder_worker.cpu.attention_steps import (
    HEAD_DIM,
    KEY_BYTES,
    KEYS,
    PAIRS,
    QUERIES,
    begin_queries,
    end_queries,
    pair_up,
    raise_highest,
    score_block,
    take_turn,
)

_BLOCK_BYTES, _SCORES_BYTES = KEYS * KEY_BYTES, KEYS * TILE_ROW_BYTES
_LOWEST = np.float32(-3.0e38)
_MOST = np.float32(2.0**100)  # of a query's sum of powers; below it none of them was too large


@njit(nogil=True, cache=True)
def _lay_out_queries(q: Any, first: Any, queries: Any) -> None:
    """Rows of q uint32 [n, PAIRS] from one on, as [PAIRS, QUERIES]; or zeros."""
    n = min(QUERIES, len(q) - first)
    queries[:, n:] = np.uint32(0)
    for column in range(n):
        row = q[first + column]
        for pair in range(PAIRS):
            queries[pair, column] = row[pair]


@njit(nogil=True, cache=True)
def _leave_out(block: Any, n_keys: Any, scores: Any, place: Any) -> None:
    """No key behind n_keys counts in the scores [place] of a block."""
    if (block + 1) * KEYS > n_keys:
        scores[place, max(0, n_keys - block * KEYS) :] = _LOWEST


@njit(nogil=True, cache=True)
def _find_highest(keys: Any, n_blocks: Any, n_keys: Any, scores: Any, highest: Any) -> None:
    """Of the loaded queries, over some blocks, whose first one's scores are left in scores[0].

    keys: address of the first block's.
    """
    highest[:] = _LOWEST
    for block in range(n_blocks - 1, -1, -1):
        score_block(keys + block * _BLOCK_BYTES, address(scores))
        _leave_out(block, n_keys, scores, 0)
        raise_highest(address(highest), address(scores))


@njit(nogil=True, cache=True)
def _mix(k: Any, v: Any, n_keys: Any, scale: Any, memory: Any) -> None:
    """All blocks' turns, for the queries that are loaded, behind `_find_highest`.

    memory: scores and powers of two blocks, highest, total [QUERIES], mixed [HEAD_DIM, QUERIES].
    """
    scores, powers, highest, total, mixed = memory
    # Addresses are taken once: Python's arrays would be counted in and out in each turn.
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
    """One head's mixed values of laid out queries, and their sums of powers."""
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
    """out = softmax(scale * ln 2 * q k) v, uint32 [n, H * HEAD_DIM / 2], two of bfloat16 in one.

    Args:
        q: uint32 [H, n, HEAD_DIM / 2], two inputs in one.
        k, v: uint16 [H, T, HEAD_DIM] and [H, HEAD_DIM, T]; T is a multiple of KEYS. Behind n_keys
            the keys may be anything, and the values must be numbers.
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
            inverse = np.float32(1) / total
            pair_up(address(mixed), address(inverse), address(pairs))
            for column in range(min(QUERIES, len(columns) - first)):
                for pair in range(PAIRS):
                    columns[first + column, pair] = pairs[pair, column]
    end_tiles()
