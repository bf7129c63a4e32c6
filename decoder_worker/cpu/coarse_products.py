"""Products of a few rows with a coarse head: by the CPU's tiles of 8 bits, or in float32.

For tiles a row of x is split into two integers of 8 bits for each input: whole steps of a 127th of
its largest value, and what these leave in steps a 254th as large. Both stand side by side in a
tile, as in `tile_products`, and their sums are exact.

Imports numba; what is for tiles compiles only where `has_bfloat16_tiles` of `tile_registers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from cluster.jit.arithmetic import larger
from cluster.jit.tile_instructions import (
    address,
    load_tile,
    multiply_int8_tiles,
    offset,
    procedure,
)
from cluster.jit.tile_registers import N_TILES, TILE_BYTES, TILE_ROW_BYTES
from decoder_worker.cpu.fused_parts import plain_product
from decoder_worker.cpu.tile_blocks import BLOCK_OUTPUTS, ROWS_OF_TILE, TILES_OF_BLOCK
from decoder_worker.cpu.tile_products import clear_sums, store_sums

STEPS = 127  # of a row's largest value, on either side of zero
FINER = 254  # steps of the second integer in one of the first
LEAST = np.float32(1e-30)  # of a row's largest value: steps per unit are finite above it
GROUP = 4  # inputs that stand together in a tile of x

_SUMS, _X, _WEIGHTS = range(TILES_OF_BLOCK), TILES_OF_BLOCK, range(TILES_OF_BLOCK + 1, N_TILES)
_intrinsic: Any = intrinsic


@_intrinsic  # type: ignore[untyped-decorator]
def _add_products(_context: Any, _x: Any, _weight: Any) -> Any:
    """Add x times weights over 64 inputs to a block's sums; both lie together at an address."""

    def write(builder: Any, x: ir.Value, weight: ir.Value) -> None:
        load_tile(builder, _X, x)
        for tile in _SUMS:
            register = _WEIGHTS[tile % len(_WEIGHTS)]
            load_tile(builder, register, offset(builder, weight, tile * TILE_BYTES))
            multiply_int8_tiles(builder, tile, register, _X)

    return procedure(write, 2)


@njit(nogil=True, cache=True)
def split_in_8_bits(x: Any) -> Any:
    """x float32 [n, d] as tiles, int8 [ceil(n / 8), d / 4, 16, 4], and the step of each row.

    float32 [n]. Rows that x does not have are zero, and so are those whose values are all below
    LEAST; a row that is not finite has no finite step.
    """
    n, d = x.shape
    split = np.zeros(((n + ROWS_OF_TILE - 1) // ROWS_OF_TILE, d // GROUP, 16, GROUP), np.int8)
    steps = np.empty(n, np.float32)
    for r in range(n):
        row, tiles, column = x[r], split[r // ROWS_OF_TILE], 2 * (r % ROWS_OF_TILE)
        largest, total = np.float32(0), np.float32(0)
        for c in range(d):
            largest = larger(largest, abs(row[c]))
            total += row[c]
        step = largest / np.float32(STEPS)
        if not np.isfinite(total) or largest < LEAST:
            steps[r] = total  # its products are zero, or NaN where the row is not finite
            continue
        steps[r] = step
        per_step = np.float32(STEPS) / largest
        for c in range(d):
            whole = np.rint(row[c] * per_step)
            rest = np.rint((row[c] - whole * step) * per_step * np.float32(FINER))
            tiles[c // GROUP, column, c % GROUP] = np.int8(whole)
            tiles[c // GROUP, column + 1, c % GROUP] = np.int8(
                min(max(rest, np.float32(-STEPS)), np.float32(STEPS))
            )
    return split, steps


@njit(nogil=True, cache=True)
def _tile_product(rows: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """first: a multiple of BLOCK_OUTPUTS."""
    split, steps = rows
    n, n_tiles = len(steps), weight.shape[1]
    sums = np.empty((BLOCK_OUTPUTS, 2 * ROWS_OF_TILE), np.int32)
    finer = np.float32(1.0 / FINER)
    for begin in range(first, last, BLOCK_OUTPUTS):
        n_out = min(BLOCK_OUTPUTS, last - begin)
        for group in range(len(split)):
            x, at = address(split[group]), address(weight[begin // BLOCK_OUTPUTS])
            clear_sums()
            for _ in range(n_tiles):
                _add_products(x, at)
                x += TILE_BYTES
                at += TILE_ROW_BYTES * BLOCK_OUTPUTS
            store_sums(address(sums))
            row = group * ROWS_OF_TILE
            for r in range(min(ROWS_OF_TILE, n - row)):
                to, step = out[row + r], steps[row + r]
                for o in range(n_out):
                    whole, rest = np.float32(sums[o, 2 * r]), np.float32(sums[o, 2 * r + 1])
                    to[begin + o] = scale[begin + o] * step * (whole + rest * finer)


def begin_coarse(x: Any, tiles: Any) -> Any:
    """What `coarse_product` takes of x float32 [n, d], on a thread that has begun a product."""
    raise NotImplementedError("only inside a kernel")


@overload(begin_coarse)
def _begin_coarse(x, tiles):
    if isinstance(tiles, types.NoneType):
        return lambda x, tiles: x
    return lambda x, tiles: split_in_8_bits(x)


def coarse_product(rows: Any, coarse: Any, tiles: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] of what `begin_coarse` gave, from a `CoarseHead`."""
    raise NotImplementedError("only inside a kernel")


@overload(coarse_product)
def _coarse_product(rows, coarse, tiles, first, last, out):
    if isinstance(tiles, types.NoneType):
        return lambda rows, coarse, tiles, first, last, out: plain_product(
            rows, coarse.weight, coarse.scale, first, last, out
        )
    return lambda rows, coarse, tiles, first, last, out: _tile_product(
        rows, coarse.weight, coarse.scale, first, last, out
    )


def lost_by_split(tiles: Any) -> Any:
    """How far an input is off at most, as a share of its row's largest value."""
    raise NotImplementedError("only inside a kernel")


@overload(lost_by_split)
def _lost_by_split(tiles):
    # The second integer ends at 127 of 254 steps, so half a step of the first is never cut off.
    share = 0.0 if isinstance(tiles, types.NoneType) else 0.5 / (STEPS * FINER)
    return lambda tiles: np.float32(share)
