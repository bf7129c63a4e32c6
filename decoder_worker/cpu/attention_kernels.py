"""Paged attention of a few query rows on a CPU, which reads pages where they lie. Imports numba.

What a row attends to is cut into pieces, which threads share out; they are joined afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from cluster.common.kernels.cpu.arithmetic import LOG2_E, exp2, larger, number, stored
from decoder_worker.cpu import attention_vectors
from decoder_worker.cpu.arrays import HEAD_DIM, PIECE, Pages
from decoder_worker.cpu.attention_vectors import fits_vectors
from decoder_worker.cpu.work_sharing import claim, finish

_LOWEST = np.float32(-3.0e38)

# `lay_out_query`, `scores_of` and `mix_values` use `attention_vectors` where it takes the dtype.


def lay_out_query(query: Any, scale: Any, keys: Any, laid_out: Any) -> None:
    """query float32 [H * HEAD_DIM or more] times scale, in any order, to laid_out [H, HEAD_DIM]."""
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
    top = _LOWEST
    for i in range(PIECE):
        top = larger(top, scores[i])
    return top


@njit(fastmath=True, nogil=True, cache=True)
def _powers(scores: Any, top: Any) -> Any:
    summed = np.float32(0)
    for i in range(PIECE):
        weight = exp2(scores[i] - top)
        scores[i] = weight
        summed += weight
    return summed


@njit(nogil=True, cache=True)
def to_weights(scores: Any, n: Any, highest: Any, total: Any) -> None:
    """Turn the first n of scores float32 [H, PIECE] into powers of two; sets highest and total."""
    for h in range(len(scores)):  # over all of a piece: loops of a fixed length take half the time
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
    for i in range(last - first):
        for h in range(len(scores)):
            q, key = query[h], keys[first + i, h]
            dot = np.float32(0)
            for c in range(HEAD_DIM):
                dot += q[c] * number(key[c])
            scores[h, i] = dot


@njit(fastmath=True, nogil=True, cache=True)
def _plain_mix(weights: Any, values: Any, first: Any, last: Any, mixed: Any) -> None:
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


@njit(nogil=True, cache=True)
def append(qkv: Any, pool: Any, last: Any, layer: Any) -> None:
    n_head = pool.shape[4]
    for r in range(len(qkv)):
        for which in range(2):
            place = pool[last[r, 0], layer, which, last[r, 1]]
            for h in range(n_head):
                first = ((which + 1) * n_head + h) * HEAD_DIM
                for c in range(HEAD_DIM):
                    place[h, c] = stored(qkv[r, first + c], place[h, c])


@njit(fastmath=True, nogil=True, cache=True)
def attend_piece(
    query: Any, piece: Any, keys: Any, values: Any, room: Any, laid_row: Any, results: Any
) -> Any:
    """Attend to a piece by all heads of its rows; returns the row whose query is in `room`.

    query: [n, at least H * HEAD_DIM]. keys, values: of a page, [page_size, H, HEAD_DIM]. room: for
    scores [H, PIECE] and a query [H, HEAD_DIM]. results: `Memory`'s highest, total and mixed.
    """
    (scores, laid_out), (highest, total, mixed) = room, results
    begin, end, first, last, index = piece[0], piece[1], piece[3], piece[4], piece[5]
    scale = np.float32(LOG2_E) / np.sqrt(np.float32(HEAD_DIM))
    for row in range(begin, end):
        if row != laid_row:
            lay_out_query(query[row], scale, keys, laid_out)
            laid_row = row
        scores_of(laid_out, keys, first, last, scores)
        to_weights(scores, last - first, highest[row, index], total[row, index])
        mix_values(scores, values, first, last, mixed[row, index])
    return laid_row


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def join(n_pieces: Any, results: Any, attended: Any) -> None:
    """Join the pieces of each row and head in attended [n, d]."""
    highest, total, mixed = results
    for r in range(len(n_pieces)):
        for h in range(mixed.shape[2]):
            top = _LOWEST
            for piece in range(n_pieces[r]):
                top = max(top, highest[r, piece, h])
            out = attended[r, h * HEAD_DIM : (h + 1) * HEAD_DIM]
            out[:] = np.float32(0)
            summed = np.float32(0)
            for piece in range(n_pieces[r]):
                share = exp2(highest[r, piece, h] - top)
                summed += share * total[r, piece, h]
                for c in range(HEAD_DIM):
                    out[c] += share * mixed[r, piece, h, c]
            for c in range(HEAD_DIM):
                out[c] /= summed


@njit(nogil=True, cache=True)
def cut(
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    last_page_len: Any,
    page_size: Any,
    causal: Any,
    packed: Any,
    pieces: Any,
    n_pieces: Any,
    last: Any,
) -> Any:
    """Fill `Pages` from a `PagedKV` and return the number of pieces.

    The last three arguments have room enough. causal: each entry's rows are its last positions, and
    see none behind their own. packed: as in `TorchAttention`.
    """
    filled = 0
    for entry in range(len(last_page_len)):
        first_row, behind = qo_indptr[entry], qo_indptr[entry + 1]
        n_rows, n_pages = behind - first_row, kv_indptr[entry + 1] - kv_indptr[entry]
        length = (n_pages - 1) * page_size + last_page_len[entry]
        for group in range(n_rows if causal else 1):
            begin, end, seen = first_row, behind, length
            if causal:  # the entry's last row sees all of it, each row before it one less
                begin, end = first_row + group, first_row + group + 1
                seen = length - n_rows + 1 + group
                last[begin, 0] = kv_indices[kv_indptr[entry] + (seen - 1) // page_size]
                last[begin, 1] = (seen - 1) % page_size
            index = 0
            for p in range((seen + page_size - 1) // page_size):
                page, n = kv_indices[kv_indptr[entry] + p], min(page_size, seen - p * page_size)
                for first in range(0, n, PIECE):
                    piece = pieces[filled]
                    piece[0], piece[1], piece[2] = begin, end, page
                    piece[3], piece[4], piece[5] = first, min(n, first + PIECE), index
                    piece[6] = n if packed else page_size
                    index += 1
                    filled += 1
            n_pieces[begin:end] = index
    return filled


@njit(nogil=True, cache=True)
def _of_layer(page: Any, index: Any, n: Any) -> Any:
    """Keys or values [n, H, HEAD_DIM]: block `index` of a page laid out for `n` positions."""
    shape = (np.int64(n), np.int64(page.shape[3]), np.int64(HEAD_DIM))  # of one type, for numba
    size = shape[0] * shape[1] * shape[2]
    flat = page.reshape(page.size)
    return flat[index * size : (index + 1) * size].reshape(shape)


@njit(nogil=True, cache=True)
def attend_pieces(
    query: Any, pages: Any, layer: Any, results: Any, counters: Any, begin: Any, end: Any
) -> Any:
    """Run the phase's units, the pieces; whether this thread finished the last one of all."""
    pool, pieces, n_done = pages.pool, pages.pieces, 0
    n_head, laid_row = pool.shape[4], np.int64(-1)
    room = (np.empty((n_head, PIECE), np.float32), np.empty((n_head, HEAD_DIM), np.float32))
    while True:
        unit = claim(counters, end)
        if unit < 0:
            return n_done == end
        piece = pieces[unit - begin]
        keys = _of_layer(pool[piece[2]], 2 * layer, piece[6])
        values = _of_layer(pool[piece[2]], 2 * layer + 1, piece[6])
        laid_row = attend_piece(query, piece, keys, values, room, laid_row, results)
        n_done = finish(counters)


def empty_pages(dtype: Any, causal: bool) -> Pages:
    indptr, zero, one = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    pieces, last = np.zeros((1, 7), np.int32), np.zeros((1, 2), np.int32)
    cut(indptr, indptr, zero, one, 2, causal, False, pieces, one.copy(), last)
    return Pages(np.zeros((1, 1, 2, 2, 1, HEAD_DIM), dtype), pieces, one, last)
