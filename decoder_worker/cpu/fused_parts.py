"""What the phases of `fused_kernels` are made of: products, attention, norms, for a few rows.

Each on the calling thread and on a part of the work. Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.jit.arithmetic import LOG2_E, erf, exp2, number, stored
from cluster.jit.rows import SUMS, add_norm_row
from decoder_worker.cpu.fused_arrays import HEAD_DIM, PIECE

_LOWEST = np.float32(-3.0e38)
_HALF, _ONE, _SQRT_HALF = np.float32(0.5), np.float32(1), np.float32(0.7071067811865476)


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_one(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    for n in range(first, last):
        row = weight[n]
        a = np.float32(0)
        for c in range(len(row)):
            a += x[c] * number(row[c])
        out[n] = a * scale[n]


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_four(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    for n in range(first, last):
        row, s = weight[n], scale[n]
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(row)):
            w = number(row[i])
            a += x0[i] * w
            b += x1[i] * w
            c += x2[i] * w
            d += x3[i] * w
        out0[n], out1[n], out2[n], out3[n] = a * s, b * s, c * s, d * s


@njit(nogil=True, cache=True)
def product(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """out[:, first:last] of x float32 [n, n_in]: a block of weights is read from memory once."""
    fours = len(x) // 4 * 4
    for row in range(0, fours, 4):
        _product_of_four(x[row : row + 4], weight, scale, first, last, out[row : row + 4])
    for row in range(fours, len(x)):
        _product_of_one(x[row], weight, scale, first, last, out[row])


@njit(fastmath=SUMS, nogil=True, cache=True)
def finish_product(out: Any, bias: Any, first: Any, last: Any, gelu: Any) -> None:
    for r in range(len(out)):
        row = out[r]
        for n in range(first, last):
            row[n] += bias[n]
        if gelu:
            for n in range(first, last):
                row[n] = row[n] * _HALF * (_ONE + erf(row[n] * _SQRT_HALF))


@njit(nogil=True, cache=True)
def append(qkv: Any, pool: Any, last: Any, layer: Any) -> None:
    """Rows' own keys and values to their places."""
    n_head = pool.shape[4]
    for r in range(len(qkv)):
        for which in range(2):
            place = pool[last[r, 0], layer, which, last[r, 1]]
            for h in range(n_head):
                first = ((which + 1) * n_head + h) * HEAD_DIM
                for c in range(HEAD_DIM):
                    place[h, c] = stored(qkv[r, first + c], place[h, c])


@njit(fastmath=True, nogil=True, cache=True)
def _scores(query: Any, keys: Any, first: Any, last: Any, scores: Any) -> None:
    """scores[h, i] = query[h] . keys[first + i, h], keys [page_size, H, HEAD_DIM]."""
    for i in range(last - first):
        for h in range(len(scores)):
            q, key = query[h * HEAD_DIM : (h + 1) * HEAD_DIM], keys[first + i, h]
            dot = np.float32(0)
            for c in range(HEAD_DIM):
                dot += q[c] * number(key[c])
            scores[h, i] = dot


@njit(fastmath=True, nogil=True, cache=True)
def _weights(scores: Any, n: Any, highest: Any, total: Any) -> None:
    """The first n scores of each head to powers of two; their highest, and the powers' sum."""
    for h in range(len(scores)):
        row, top = scores[h], _LOWEST
        for i in range(n):
            top = max(top, row[i])
        summed = np.float32(0)
        for i in range(n):
            weight = exp2(row[i] - top)
            row[i] = weight
            summed += weight
        highest[h], total[h] = top, summed


@njit(fastmath=True, nogil=True, cache=True)
def _mix(weights: Any, values: Any, first: Any, last: Any, mixed: Any) -> None:
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


@njit(fastmath=True, nogil=True, cache=True)
def attend_piece(query: Any, piece: Any, keys: Any, values: Any, results: Any) -> None:
    """All heads of the rows that attend to a piece.

    query [n, at least H * HEAD_DIM]; keys and values of a page, [page_size, H, HEAD_DIM]; results
    `Memory`'s highest, total and mixed.
    """
    highest, total, mixed = results
    begin, end, first, last, index = piece[0], piece[1], piece[3], piece[4], piece[5]
    n_head = keys.shape[1]
    scores = np.empty((n_head, PIECE), np.float32)
    scaled = np.empty(n_head * HEAD_DIM, np.float32)
    scale = np.float32(LOG2_E) / np.sqrt(np.float32(HEAD_DIM))
    for row in range(begin, end):
        for c in range(n_head * HEAD_DIM):
            scaled[c] = query[row, c] * scale
        _scores(scaled, keys, first, last, scores)
        _weights(scores, last - first, highest[row, index], total[row, index])
        _mix(scores, values, first, last, mixed[row, index])


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def join(n_pieces: Any, results: Any, attended: Any) -> None:
    """The pieces of each row and head to one, in attended [n, d]."""
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
    pieces: Any,
    n_pieces: Any,
    last: Any,
) -> Any:
    """Fill `Pages` from a `PagedKV`; how many pieces there are."""
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
                    index += 1
                    filled += 1
            n_pieces[begin:end] = index
    return filled


@njit(nogil=True, cache=True)
def norm(norm: Any, x: Any, delta: Any, normed: Any) -> None:
    """Add what a product gave, and norm the sum for the next one. norm [2, d]."""
    for r in range(len(x)):
        add_norm_row(x[r], delta[r], norm[0], norm[1], normed[r])
