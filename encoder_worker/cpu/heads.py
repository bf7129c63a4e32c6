"""Rows of queries, keys and values to heads, on the calling thread. Imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.jit.arithmetic import number
from cluster.jit.rows import SUMS

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
