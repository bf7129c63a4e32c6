"""Kernels between the encoder's matrix products on a CPU, each one pass over rows in cache.

All run on the calling thread. Imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.arithmetic import number, stored
from cluster.common.kernels.cpu.rows import SUMS, add_norm
from cluster.common.kernels.cpu.tile_registers import HEAD_DIM, tile_config
from encoder_worker.cpu.rows import Int8Kernels, build_int8, split
from encoder_worker.cpu.tile_attention import KEYS, attend
from encoder_worker.cpu.vector_attention import VectorKernels, build_vectors


@dataclass(frozen=True, slots=True)
class TeamKernels:
    """`own` stands for the encoder's dtype: float32, or bfloat16 stored as uint16.

    add_norm: `cluster.common.kernels.cpu.rows`.
    split(qkv, begin, q, k, v, key_sums): rows [n, 3 * d] of positions from `begin` on to q [H, n,
        Dh], k and v [H, T, Dh], all own; key_sums float32 [d] = the sums of k's rows.
    centre(k, begin, end, mean): k [H, begin:end, Dh] -= mean, float32 [d].
    attend: `tile_attention.attend` where the CPU has tiles and own is bfloat16, else None. Then v
        of `split` may be a view of [H, Dh, T].
    int8: replaces add_norm and split where the encoder's products are of int8; else None.
    vectors: 8-bit attention where products are of int8 or own is bfloat16; or None.
    """

    add_norm: Callable[..., None]
    split: Callable[..., None]
    centre: Callable[..., None]
    attend: Callable[..., None] | None = None
    int8: Int8Kernels | None = None
    vectors: VectorKernels | None = None


@njit(fastmath=SUMS, nogil=True, cache=True)
def _centre(k: Any, begin: Any, end: Any, mean: Any) -> None:
    n_head, _, head_dim = k.shape
    for h in range(n_head):
        for r in range(begin, end):
            for c in range(head_dim):
                k[h, r, c] = stored(number(k[h, r, c]) - mean[h * head_dim + c], k[h, r, c])


def build(
    own: Any,
    *,
    tiles: bool = False,  # attend by the CPU's tiles (uint16 only)
    int8: bool = False,
    in_8_bits: bool = False,  # attend by its vectors
) -> TeamKernels:
    """Compile (or load) the kernels; `own` is uint16 or float32."""
    plain, row = np.zeros(4, np.float32), np.zeros((1, 4), own)
    heads = np.zeros((1, 1, 4), own)
    add_norm(np.zeros((1, 4), np.float32), row, plain, plain, row.copy())
    # Two heads and rows, since numba would compile for a contiguous view if there were one.
    values = np.zeros((2, 4, 2), own).transpose(0, 2, 1) if tiles else heads.copy()
    split(np.zeros((1, 12), own), 0, heads, heads.copy(), values, plain)
    in_int8 = build_int8(own, values) if int8 else None
    if tiles:
        _build_attend()
        return TeamKernels(add_norm, split, _centre, attend, in_int8)
    _centre(heads, 0, 1, plain)
    attending = build_vectors(own) if in_8_bits else None
    return TeamKernels(add_norm, split, _centre, None, in_int8, attending)


def _build_attend() -> None:
    q, out = np.zeros((1, 1, HEAD_DIM // 2), np.uint32), np.zeros((1, HEAD_DIM // 2), np.uint32)
    k, v = np.zeros((1, KEYS, HEAD_DIM), np.uint16), np.zeros((1, HEAD_DIM, KEYS), np.uint16)
    attend(q, k, v, 1, np.float32(1), tile_config(), out)
