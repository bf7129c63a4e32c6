"""Paged attention of decode steps on a CPU: pages are read where they lie, once for each head.

For few query rows an attention is bound by the memory that it reads; torch's kernel, made for many,
reaches a fifth of that in bfloat16. Imports numba: `decoder_worker.cpu.attention` builds this in
the background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, prange

from cluster.jit.arithmetic import LOG2_E, exp2, number, stored
from cluster.jit.background import on_torch_threads

HEAD_DIM = 64  # of every published checkpoint: a constant, so that loops over it unroll
_LOWEST = np.float32(-3.0e38)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Both take and give arrays on the tensors' memory, bfloat16 as uint16.

    attend(q, pool, layer, qo_indptr, kv_indptr, kv_indices, last_page_len, scores, out):
        q, out [n_tokens, head, head_dim]; pool [page, layer, 2, page_size, head, head_dim]; the
        four indices as in `PagedKV`, int32; scores: float32 [n entries * head, most positions],
        scratch. Every query sees all of its entry's positions. `attend_alone` takes the same.
    append(k, v, pool, layer, kv_indptr, kv_indices, last_page_len): write the one new token of each
        entry, k and v [n entries, head, head_dim], to its entry's last position.
    """

    attend: Callable[..., None]  # on all of torch's threads
    attend_alone: Callable[..., None]  # on the calling thread
    append: Callable[..., None]


@njit(fastmath=True, nogil=True, cache=True)
def _dots(q: Any, keys: Any, head: Any, n: Any, scores: Any) -> Any:
    """scores[i] = q . keys[i, head] for the first n keys; the highest of them."""
    highest = _LOWEST
    for i in range(n):
        key = keys[i, head]
        dot = np.float32(0)
        for d in range(HEAD_DIM):
            dot += q[d] * number(key[d])
        scores[i] = dot
        highest = max(highest, dot)
    return highest


@njit(fastmath=True, nogil=True, cache=True)
def _mix(weights: Any, values: Any, head: Any, n: Any, mixed: Any) -> None:
    """mixed += weights[i] * values[i, head], over the first n values."""
    for i in range(n):
        weight = weights[i]
        value = values[i, head]
        for d in range(HEAD_DIM):
            mixed[d] += weight * number(value[d])


@njit(fastmath=True, nogil=True, cache=True)
def _attend_unit(
    unit, q, pool, layer, qo_indptr, kv_indptr, kv_indices, last_page_len, scores, out
):
    """One head of one entry, all of its queries."""
    n_head, page_size = q.shape[1], pool.shape[3]
    scale = LOG2_E / np.sqrt(np.float32(HEAD_DIM))
    entry, head = unit // n_head, unit % n_head
    begin, end = kv_indptr[entry], kv_indptr[entry + 1]
    weights = scores[unit]
    query = np.empty(HEAD_DIM, np.float32)
    mixed = np.empty(HEAD_DIM, np.float32)
    for row in range(qo_indptr[entry], qo_indptr[entry + 1]):
        for d in range(HEAD_DIM):
            query[d] = number(q[row, head, d]) * scale
            mixed[d] = np.float32(0)
        highest, filled = _LOWEST, 0
        for index in range(begin, end):
            n = page_size if index < end - 1 else last_page_len[entry]
            keys = pool[kv_indices[index], layer, 0]
            highest = max(highest, _dots(query, keys, head, n, weights[filled:]))
            filled += n
        total = np.float32(0)
        for i in range(filled):
            weight = exp2(weights[i] - highest)
            weights[i] = weight
            total += weight
        filled = 0
        for index in range(begin, end):
            n = page_size if index < end - 1 else last_page_len[entry]
            values = pool[kv_indices[index], layer, 1]
            _mix(weights[filled:], values, head, n, mixed)
            filled += n
        for d in range(HEAD_DIM):
            out[row, head, d] = stored(mixed[d] / total, out[row, head, d])


@njit(nogil=True, cache=True)
def _attend_alone(q, pool, layer, qo_indptr, kv_indptr, kv_indices, last_page_len, scores, out):
    pages = (kv_indptr, kv_indices, last_page_len)
    for unit in range(len(last_page_len) * q.shape[1]):
        _attend_unit(unit, q, pool, layer, qo_indptr, *pages, scores, out)


@njit(parallel=True, nogil=True, cache=True)
def _attend_together(q, pool, layer, qo_indptr, kv_indptr, kv_indices, last_page_len, scores, out):
    pages = (kv_indptr, kv_indices, last_page_len)
    for unit in prange(len(last_page_len) * q.shape[1]):
        _attend_unit(unit, q, pool, layer, qo_indptr, *pages, scores, out)


@njit(nogil=True, cache=True)
def _append(
    k: Any, v: Any, pool: Any, layer: Any, kv_indptr: Any, kv_indices: Any, last_page_len: Any
) -> None:
    for entry in range(len(last_page_len)):
        page = kv_indices[kv_indptr[entry + 1] - 1]
        position = last_page_len[entry] - 1
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                pool[page, layer, 0, position, head, d] = k[entry, head, d]
                pool[page, layer, 1, position, head, d] = v[entry, head, d]


def build(own: Any, cross: Any) -> Kernels:
    """Compile (or load) the kernels for a model in `own` and cross pools in `cross`.

    Both are uint16 or float32.
    """
    qkv = np.zeros((1, 3, 1, HEAD_DIM), own)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]  # strided, as a layer's fused product gives them
    own_pool, cross_pool = (np.zeros((1, 1, 2, 2, 1, HEAD_DIM), dtype) for dtype in (own, cross))
    indptr, indices = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    pages = (indptr, indices, np.ones(1, np.int32))
    scores, out = np.zeros((1, 2), np.float32), np.zeros((1, 1, HEAD_DIM), own)
    _append(k, v, own_pool, 0, *pages)
    for attend in (_attend_alone, _attend_together):
        attend(q, own_pool, 0, indptr, *pages, scores, out)
        attend(out.copy(), cross_pool, 0, indptr, *pages, scores, out)
    return Kernels(on_torch_threads(_attend_together, _attend_alone), _attend_alone, _append)
