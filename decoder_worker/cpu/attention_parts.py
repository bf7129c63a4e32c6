"""Scores and mixed values of one query over a piece of a page: the way for this CPU and dtype.

By numba's own loops, which take every dtype, or by `attention_vectors`; which of the two is
compiled is decided here. Imports numba: `attention_kernels` is made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from cluster.common.kernels.cpu.arithmetic import exp2, larger, number
from decoder_worker.cpu import attention_vectors
from decoder_worker.cpu.attention_vectors import fits_vectors
from decoder_worker.cpu.fused_arrays import HEAD_DIM, PIECE

_LOWEST = np.float32(-3.0e38)


def lay_out_query(query: Any, scale: Any, keys: Any, laid_out: Any) -> None:
    """query float32 [at least H * HEAD_DIM] times scale, to laid_out [H, HEAD_DIM], in any order.

    keys: of the dtype that `scores_of` will be given.
    """
    raise NotImplementedError("only inside a kernel")


@overload(lay_out_query)
def _lay_out_query(query, scale, keys, laid_out):
    if fits_vectors(keys.dtype):
        return lambda query, scale, keys, laid_out: attention_vectors.lay_out_query(
            query, scale, keys, laid_out
        )

    def lay_out(query, scale, keys, laid_out):
        flat = laid_out.reshape(laid_out.size)
        for c in range(len(flat)):
            flat[c] = query[c] * scale

    return lay_out


def scores_of(laid_out: Any, keys: Any, first: Any, last: Any, scores: Any) -> None:
    """scores[h, i] = query[h] . keys[first + i, h], keys [page_size, H, HEAD_DIM]."""
    raise NotImplementedError("only inside a kernel")


@overload(scores_of)
def _scores_of(laid_out, keys, first, last, scores):
    if fits_vectors(keys.dtype):
        return lambda laid_out, keys, first, last, scores: attention_vectors.scores_of(
            laid_out, keys, first, last, scores
        )
    return lambda laid_out, keys, first, last, scores: _plain_scores(
        laid_out, keys, first, last, scores
    )


@njit(nogil=True, cache=True)
def _highest(scores: Any) -> Any:
    """The largest of scores [PIECE]."""
    top = _LOWEST
    for i in range(PIECE):
        top = larger(top, scores[i])
    return top


@njit(fastmath=True, nogil=True, cache=True)
def _powers(scores: Any, top: Any) -> Any:
    """scores [PIECE] to powers of two, below the highest; their sum."""
    summed = np.float32(0)
    for i in range(PIECE):
        weight = exp2(scores[i] - top)
        scores[i] = weight
        summed += weight
    return summed


@njit(nogil=True, cache=True)
def to_weights(scores: Any, n: Any, highest: Any, total: Any) -> None:
    """The first n scores of each head to powers of two; their highest, and the powers' sum.

    scores float32 [H, PIECE]. As many are computed as a piece may have: loops of a fixed length
    take half of the time.
    """
    for h in range(len(scores)):
        for i in range(n, PIECE):
            scores[h, i] = _LOWEST
        own = scores[h]
        top = _highest(own)
        highest[h], total[h] = top, _powers(own, top)


def mix_values(weights: Any, values: Any, first: Any, last: Any, mixed: Any) -> None:
    """mixed[h] = the sum of weights[h, i] * values[first + i, h]."""
    raise NotImplementedError("only inside a kernel")


@overload(mix_values)
def _mix_values(weights, values, first, last, mixed):
    if fits_vectors(values.dtype):
        return lambda weights, values, first, last, mixed: attention_vectors.mix_values(
            weights, values, first, last, mixed
        )
    return lambda weights, values, first, last, mixed: _plain_mix(
        weights, values, first, last, mixed
    )


@njit(fastmath=True, nogil=True, cache=True)
def _plain_scores(query: Any, keys: Any, first: Any, last: Any, scores: Any) -> None:
    """scores[h, i] = query[h] . keys[first + i, h], keys [page_size, H, HEAD_DIM]."""
    for i in range(last - first):
        for h in range(len(scores)):
            q, key = query[h], keys[first + i, h]
            dot = np.float32(0)
            for c in range(HEAD_DIM):
                dot += q[c] * number(key[c])
            scores[h, i] = dot


@njit(fastmath=True, nogil=True, cache=True)
def _plain_mix(weights: Any, values: Any, first: Any, last: Any, mixed: Any) -> None:
    """mixed[h] = the sum of weights[h, i] * values[first + i, h]."""
    mixed[:] = np.float32(0)
    i, n = 0, last - first
    while i + 4 <= n:  # a sum is read and written once for four values
        v0, v1 = values[first + i], values[first + i + 1]
        v2, v3 = values[first + i + 2], values[first + i + 3]
        for h in range(len(mixed)):
            out, row = mixed[h], weights[h]
            w0, w1, w2, w3 = row[i], row[i + 1], row[i + 2], row[i + 3]
            for c in range(HEAD_DIM):
                two = w0 * number(v0[h, c]) + w1 * number(v1[h, c])
                out[c] += two + w2 * number(v2[h, c]) + w3 * number(v3[h, c])
        i += 4
    while i < n:
        for h in range(len(mixed)):
            for c in range(HEAD_DIM):
                mixed[h, c] += weights[h, i] * number(values[first + i, h, c])
        i += 1
