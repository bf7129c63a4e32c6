"""Rows of products as heads or in 8 bits, written on the calling thread. Imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from cluster.common.kernels.cpu.arithmetic import number
from cluster.common.kernels.cpu.background import as_array
from cluster.common.kernels.cpu.rows import SUMS
from cluster.common.kernels.gpu.scatter import stored_as

N_BFLOAT16 = 1 << 16
BLOCK = 32  # rows whose values are put together: of one dimension they fill a line of cache


@njit(fastmath=SUMS, nogil=True, cache=True)
def put_queries_keys(row: Any, r: Any, begin: Any, q: Any, k: Any, key_sums: Any) -> None:
    """Row r, of 2 * d or more, to heads; adds its keys to key_sums."""
    n_head, _, head_dim = q.shape
    d = n_head * head_dim
    for h in range(n_head):
        first = h * head_dim
        for c in range(head_dim):
            q[h, r, c] = row[first + c]
        for c in range(head_dim):
            key = row[d + first + c]
            k[h, begin + r, c] = key
            key_sums[first + c] += number(key)


@njit(nogil=True, cache=True)
def put_values(rows: Any, begin: Any, v: Any) -> None:
    """At most BLOCK rows [n, d] of positions from `begin` on, to heads, in the order they lie in.

    Where v lies as [H, Dh, T] and takes one row at a time, this takes six times as long.
    """
    n_head, _, head_dim = v.shape
    n = len(rows)
    if v.strides[1] < v.strides[2]:
        for h in range(n_head):
            for c in range(head_dim):
                to, column = v[h, begin : begin + n, c], rows[:, h * head_dim + c]
                for r in range(n):
                    to[r] = column[r]
    else:
        for r in range(n):
            for h in range(n_head):
                for c in range(head_dim):
                    v[h, begin + r, c] = rows[r, h * head_dim + c]


@njit(nogil=True, cache=True)
def split(qkv: Any, begin: Any, q: Any, k: Any, v: Any, key_sums: Any) -> None:
    """Rows [n, 3 * d] of positions from `begin` on to heads; see `TeamKernels`."""
    n, d = len(qkv), qkv.shape[1] // 3
    key_sums[:] = np.float32(0)
    for first in range(0, n, BLOCK):
        last = min(n, first + BLOCK)
        for r in range(first, last):
            put_queries_keys(qkv[r], r, begin, q, k, key_sums)
        put_values(qkv[first:last, 2 * d :], begin + first, v)


@njit(nogil=True, cache=True)
def _look_up(rows: Any, codes: Any, out: Any) -> None:
    for r in range(len(rows)):
        row, to = rows[r], out[r]
        for c in range(len(row)):
            to[c] = codes[row[c]]


@cache
def _codes() -> Any:
    """uint8 [N_BFLOAT16], by the bits of a bfloat16."""
    every = torch.from_numpy(np.arange(N_BFLOAT16, dtype=np.uint16)).view(torch.bfloat16)
    return stored_as(every, torch.float8_e4m3fn).view(torch.uint8).numpy()


def store_float8(rows: Tensor, block: Tensor) -> None:
    """rows bfloat16 [n, d] to block float8_e4m3fn [n, d], as `stored_as` converts them.

    By a table of what each number becomes: torch takes three passes for it, and a sixth of the time
    that the products before it take.
    """
    _look_up(as_array(rows), _codes(), as_array(block))


def build_float8() -> None:
    """Compile (or load) what stores float8."""
    empty = torch.zeros(2, 2, dtype=torch.bfloat16)
    store_float8(empty, empty.to(torch.float8_e4m3fn))
