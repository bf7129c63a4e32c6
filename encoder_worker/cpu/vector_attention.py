"""Attention of some queries to all keys of a window by 8-bit vectors, on the calling thread.

For CPUs with AVX-512 VNNI and no tiles. Queries and keys have a scale each; keys come without their
mean, which softmax does not see. Values have a scale for each dimension, and their mean is added at
the end. Powers become whole multiples of a 255th of a row's highest; a dither that differs from key
to key is added first, so that many small powers are not all lost.

16 queries at a time go through the keys in blocks of 64, within the second-level cache. Imports
numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import int32, njit, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from cluster.common.kernels.cpu import vectors
from cluster.common.kernels.cpu.arithmetic import as_bits, number, stored
from cluster.common.kernels.cpu.rows import SUMS
from cluster.common.kernels.cpu.tile_instructions import WORD, address, offset
from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    HEAD_DIM,
    INPUTS_OF_GROUP,
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
)
from cluster.common.kernels.cpu.vector_sums import MORE, sum_16_rows, sum_16_unsigned_rows
from encoder_worker.cpu.rows import scale_of

KEYS = BLOCK_OUTPUTS  # of a block
QUERIES = TILE_ROWS  # computed at a time
_STEPS = np.float32(127)  # what the largest number becomes
_MOST = np.float32(np.log2(255))  # log2 of what the highest power becomes
# From 2 ** 23 on a float32 has no fraction: adding this rounds to the nearest integer, whose lowest
# byte is the last one.
_WHOLE = np.float32(1.5 * 2**23)
_LEAST = np.float32(1e-30)  # of a largest number, so that inverse scales are finite
_NOTHING = np.float32(-1e30)  # added to scores behind the last key
_BLOCK_BYTES = TILES_OF_BLOCK * TILE_BYTES
_SCORES_BYTES = 4 * KEYS
_intrinsic: Any = intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def _scale_scores(
    _context: Any, _sums: Any, _scales: Any, _added: Any, _to: Any, _highest: Any
) -> Any:
    """Scale one query's sums with a block of keys, and raise the highest by lanes.

    All are addresses: of the sums in the first tile, and of float32 [KEYS], [KEYS], [KEYS], [16].
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        sums, scales, added, to, highest = args
        top = vectors.load(builder, highest)
        for tile in range(TILES_OF_BLOCK):
            whole = vectors.load_integers(builder, offset(builder, sums, tile * TILE_BYTES))
            at = tile * TILE_ROW_BYTES
            scale, more = (vectors.load(builder, offset(builder, x, at)) for x in (scales, added))
            score = vectors.multiply_add(builder, whole, scale, more)
            vectors.store(builder, score, offset(builder, to, at))
            top = vectors.greater(builder, score, top)
        vectors.store(builder, top, highest)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _take_powers(
    _context: Any,
    _scores: Any,
    _n_blocks: Any,
    _scale: Any,
    _most: Any,
    _dither: Any,
    _to: Any,
    _total: Any,
) -> Any:
    """2 ** (scale * score + most) of a query and all blocks, as a row of bytes of each tile.

    scores, dither, to and total are addresses: of float32 [T]; of float32 [KEYS], added before
    truncation; of the first tile's row; and of float32 [16], the sums of the powers.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        scores, n_blocks, scale, most, dither, to, total = args
        scale, most = (vectors.everywhere(builder, one) for one in (scale, most))
        sums = cgutils.alloca_once(builder, vectors.FLOATS)  # becomes a register
        builder.store(vectors.constant(0.0), sums)
        with cgutils.for_range(builder, n_blocks, intp=WORD) as loop:
            at = builder.add(scores, builder.mul(loop.index, WORD(_SCORES_BYTES)))
            parts, added = [], builder.load(sums)
            for part in range(TILES_OF_BLOCK):
                score = vectors.load(builder, offset(builder, at, part * TILE_ROW_BYTES))
                exponent = vectors.multiply_add(builder, score, scale, most)
                more = vectors.load(builder, offset(builder, dither, part * TILE_ROW_BYTES))
                power = builder.fadd(vectors.exp2(builder, exponent), more)
                parts.append(power)
            packed = vectors.bytes_of(builder, parts)
            place = builder.add(to, builder.mul(loop.index, WORD(TILE_BYTES)))
            builder.store(packed, builder.inttoptr(place, packed.type.as_pointer())).align = 1
            for part in parts:
                whole = builder.fptosi(part, vectors.INTS)
                added = builder.fadd(added, builder.sitofp(whole, vectors.FLOATS))
            builder.store(added, sums)
        vectors.store(builder, builder.load(sums), total)
        return context.get_dummy_value()

    numbers = (types.float32, types.float32)
    return types.none(types.int64, types.int64, *numbers, *[types.int64] * 3), generate


@njit(error_model="numpy", nogil=True, cache=True)
def _quantize(row: Any, scale: Any, to: Any) -> None:
    inverse = np.float32(1) / scale
    for c in range(HEAD_DIM):
        to[c] = np.int8(as_bits(number(row[c]) * inverse + _WHOLE) & uint32(0xFF))


@njit(error_model="numpy", nogil=True, cache=True)
def _lay_out_keys(k: Any, n: Any, blocks: Any, scales: Any) -> None:
    row = np.zeros(HEAD_DIM, np.int8)
    groups = row.view(np.int32)
    for key in range(len(blocks) * KEYS):
        tile, column = blocks[key // KEYS, key // TILE_ROWS % TILES_OF_BLOCK], key % TILE_ROWS
        if key < n:
            scales[0, key], scales[1, key] = scale_of(k[key]), np.float32(0)
            _quantize(k[key], scales[0, key], row)
        else:
            scales[0, key], scales[1, key] = np.float32(0), _NOTHING
        for group in range(len(groups)):
            tile[group, column] = groups[group]


@njit(fastmath=SUMS, error_model="numpy", nogil=True, cache=True)
def _find_scales(v: Any, n: Any, mean: Any, scales: Any) -> None:
    """Mean of each dimension, and the scale that makes its largest deviation 127."""
    share = np.float32(1) / np.float32(n)
    mean[:], scales[:] = np.float32(0), np.float32(0)
    for key in range(n):
        for c in range(HEAD_DIM):
            mean[c] += number(v[key, c]) * share
    largest = scales.view(np.int32)
    for key in range(n):
        for c in range(HEAD_DIM):
            size = int32(as_bits(number(v[key, c]) - mean[c]) & uint32(0x7FFFFFFF))
            largest[c] = max(largest[c], size)
    for c in range(HEAD_DIM):
        scales[c] = _LEAST if scales[c] < _LEAST else scales[c] / _STEPS


@njit(error_model="numpy", nogil=True, cache=True)
def _add_bytes(value: Any, mean: Any, inverse: Any, place: Any, words: Any) -> None:
    """A value's numbers in 8 bits, to byte `place` (0 to 3) of a word each."""
    shift = uint32(8 * place)
    for c in range(HEAD_DIM):
        byte = as_bits((number(value[c]) - mean[c]) * inverse[c] + _WHOLE) & uint32(0xFF)
        words[c] |= uint32(byte << shift)


@njit(error_model="numpy", nogil=True, cache=True)
def _lay_out_values(v: Any, n: Any, blocks: Any, scales: Any) -> None:
    mean, own = scales[0], scales[1]
    _find_scales(v, n, mean, own)
    inverse, words = np.float32(1) / own, np.empty(HEAD_DIM, np.uint32)
    for first in range(0, len(blocks) * KEYS, INPUTS_OF_GROUP):
        for c in range(HEAD_DIM):
            words[c] = uint32(0)
        for key in range(first, min(n, first + INPUTS_OF_GROUP)):
            _add_bytes(v[key], mean, inverse, key - first, words)
        # In the order in which `vectors.bytes_of` leaves a block's powers.
        group = first % KEYS // INPUTS_OF_GROUP
        place = group % TILES_OF_BLOCK * TILES_OF_BLOCK + group // TILES_OF_BLOCK
        for tile in range(TILES_OF_BLOCK):
            own_words, to = words[tile * TILE_ROWS :], blocks[first // KEYS, tile, place]
            for i in range(TILE_ROWS):
                to[i] = int32(own_words[i])


@njit(nogil=True, cache=True)
def lay_out_heads(k: Any, v: Any, n: Any, keys: Any, values: Any) -> None:
    """Quantise the first n keys and values, [H, n or more, HEAD_DIM], as 8-bit weights lie.

    keys, values: arrays (blocks, scales). blocks: int32 [H, T / KEYS, TILES_OF_BLOCK, 16, 16], T >=
    n. scales, float32: of keys [H, 2, T], the scale and what is added to the score; of values [H,
    2, HEAD_DIM], each dimension's mean, which the blocks do not include, and scale.
    """
    for h in range(len(k)):
        _lay_out_keys(k[h], n, keys[0][h], keys[1][h])
        _lay_out_values(v[h], n, values[0][h], values[1][h])


@njit(error_model="numpy", nogil=True, cache=True)
def _finish(n_rows: Any, sums: Any, totals: Any, scales: Any, out: Any) -> None:
    mean, own = scales
    for r in range(n_rows):
        inverse = np.float32(1) / totals[r].sum()
        for tile in range(TILES_OF_BLOCK):
            for c in range(TILE_ROWS):
                at = tile * TILE_ROWS + c
                mixed = mean[at] + np.float32(sums[tile, r, c]) * inverse * own[at]
                out[r, at] = stored(mixed, out[r, at])


@njit(error_model="numpy", nogil=True, cache=True)
def _attend_head(
    q: Any,
    keys: Any,
    key_scales: Any,
    values: Any,
    value_scales: Any,
    scale: Any,
    memory: Any,
    out: Any,
) -> None:
    """Compute one head of `attend_in_8_bits`, which makes the memory."""
    rows, begins, nothing, steps, sums, scores, highest, powers, totals, dither = memory
    # Addresses are taken once, as arrays would be reference-counted in each turn. The arrays must
    # be arguments: numba frees its own ones after the last use of their names.
    at, to, top = address(sums), address(scores), address(highest)
    laid_out, before, counted = address(rows), address(begins), address(totals)
    weighed, none, added = address(powers), address(nothing), address(dither)
    blocks, scales, mixing = address(keys), address(key_scales), address(values)
    n, n_blocks = len(q), len(keys)
    row_bytes = n_blocks * _SCORES_BYTES
    for first in range(0, n, QUERIES):
        n_rows = min(QUERIES, n - first)
        for r in range(n_rows):
            steps[r] = scale_of(q[first + r])
            _quantize(q[first + r], steps[r], rows[r])
            total = int32(0)
            for c in range(HEAD_DIM):
                total += int32(rows[r, c])
            begins[r] = -MORE * total
        highest[:] = _NOTHING
        for block in range(n_blocks):
            key = block * _SCORES_BYTES
            sum_16_rows(laid_out, blocks + block * _BLOCK_BYTES, 1, before, at)
            for r in range(n_rows):
                _scale_scores(
                    at + r * TILE_ROW_BYTES,
                    scales + key,
                    scales + row_bytes + key,
                    to + r * row_bytes + key,
                    top + r * TILE_ROW_BYTES,
                )
        for r in range(n_rows):
            factor = scale * steps[r]
            _take_powers(
                to + r * row_bytes,
                n_blocks,
                factor,
                _MOST - highest[r].max() * factor,
                added,
                weighed + r * TILE_ROW_BYTES,
                counted + r * TILE_ROW_BYTES,
            )
        sum_16_unsigned_rows(weighed, mixing, n_blocks, none, at)
        _finish(n_rows, sums, totals, value_scales, out[first:])


@njit(error_model="numpy", nogil=True, cache=True)
def attend_in_8_bits(q: Any, keys: Any, values: Any, scale: Any, out: Any) -> None:
    """out = softmax(scale * ln 2 * q k) v, [n, H * HEAD_DIM], of queries q [H, n, HEAD_DIM].

    keys, values: as `lay_out_heads` leaves them.
    """
    n_blocks = keys[0].shape[1]
    dither = np.empty(KEYS, np.float32)
    for key in range(KEYS):
        dither[key] = np.float32((key * 37 % KEYS + 0.5) / KEYS)
    memory = (
        np.zeros((QUERIES, HEAD_DIM), np.int8),
        np.zeros(QUERIES, np.int32),
        np.zeros(QUERIES, np.int32),
        np.zeros(QUERIES, np.float32),
        np.empty((TILES_OF_BLOCK, TILE_ROWS, TILE_ROWS), np.int32),
        np.empty((QUERIES, n_blocks * KEYS), np.float32),
        np.empty((QUERIES, TILE_ROWS), np.float32),
        np.zeros((n_blocks, TILE_ROWS, KEYS), np.uint8),
        np.empty((QUERIES, TILE_ROWS), np.float32),
        dither,
    )
    for h in range(len(q)):
        own = out[:, h * HEAD_DIM : (h + 1) * HEAD_DIM]
        _attend_head(q[h], keys[0][h], keys[1][h], values[0][h], values[1][h], scale, memory, own)


@dataclass(frozen=True, slots=True)
class VectorKernels:
    lay_out: Callable[..., None]
    attend: Callable[..., None]


def build_vectors(own: Any) -> VectorKernels:
    """Compile (or load) the kernels; `own` is uint16 (for bfloat16) or float32."""
    # All arrays are contiguous but out, whose rows may lie apart.
    q = np.zeros((1, 1, HEAD_DIM), own)
    blocks = np.zeros((1, 1, TILES_OF_BLOCK, TILE_ROWS, TILE_ROWS), np.int32)
    scales = np.zeros((1, 2, KEYS), np.float32)
    keys, values = (blocks, scales), (blocks.copy(), scales.copy())
    lay_out_heads(q, q.copy(), 1, keys, values)
    attend_in_8_bits(q, keys, values, np.float32(1), q[0].copy())
    return VectorKernels(lay_out_heads, attend_in_8_bits)
