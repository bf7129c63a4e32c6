"""Paged attention of a few query rows on a CPU: pages are read where they lie.

For few rows an attention is bound by the memory that it reads; torch's kernel, which is made for
many, reaches a fifth of that in bfloat16. What a row attends to is cut into pieces, which threads
share out; the pieces of a row are then joined. `fused_kernels` has the same as phases of a layer.

Imports numba: `decoder_worker.cpu.attention` builds this in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.arithmetic import LOG2_E, exp2, stored
from decoder_worker.cpu.attention_parts import lay_out_query, mix_values, scores_of, to_weights
from decoder_worker.cpu.fused_arrays import HEAD_DIM, PIECE, Pages
from decoder_worker.cpu.step_team import new_counters
from decoder_worker.cpu.work_sharing import claim, conclude, finish, wait

_LOWEST = np.float32(-3.0e38)


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
def attend_piece(
    query: Any, piece: Any, keys: Any, values: Any, room: Any, laid_row: Any, results: Any
) -> Any:
    """All heads of the rows that attend to a piece.

    query [n, at least H * HEAD_DIM]; keys and values of a page, [page_size, H, HEAD_DIM]; room for
    scores [H, PIECE] and a query [H, HEAD_DIM], where that of `laid_row` lies; results `Memory`'s
    highest, total and mixed. The row whose query lies there now.
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
    packed: Any,
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
                    piece[6] = n if packed else page_size
                    index += 1
                    filled += 1
            n_pieces[begin:end] = index
    return filled


@njit(nogil=True, cache=True)
def _of_layer(page: Any, index: Any, n: Any) -> Any:
    """Keys or values [n, H, HEAD_DIM], block `index` of a page laid out for `n` positions."""
    shape = (np.int64(n), np.int64(page.shape[3]), np.int64(HEAD_DIM))  # of one type, for numba
    size = shape[0] * shape[1] * shape[2]
    flat = page.reshape(page.size)
    return flat[index * size : (index + 1) * size].reshape(shape)


@njit(nogil=True, cache=True)
def attend_pieces(
    query: Any, pages: Any, layer: Any, results: Any, counters: Any, begin: Any, end: Any
) -> Any:
    """The phase's units, while there are any: a unit is a piece.

    Whether all of them are done by this thread's last one.
    """
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


@njit(nogil=True, cache=True)
def _attend(
    query: Any,
    pages: Any,
    layer: Any,
    results: Any,
    attended: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    end = begin + len(pages.pieces)
    if attend_pieces(query, pages, layer, results, counters, begin, end):
        join(pages.n_pieces, results, attended)
        conclude(counters)
    wait(counters, end + 1, leads)


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """cut(qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, causal, packed, pieces,
        n_pieces, last): `Pages` of a `PagedKV`, with room enough in the last three; the number of
        pieces. causal: each entry's rows are its last positions, and see none behind their own.
        packed: as in `TorchAttention`.
    append(qkv, pool, last, layer): the keys and values in qkv, float32 [n, 3 * d], to their places.
    attend(query, pages, layer, results, attended, counters, begin, leads): attended float32 [n, d]
        of query float32 [n, at least d]; results are `Memory`'s highest, total and mixed; begin is
        the first unit's number, and there is one unit more than pieces; leads is False on the
        threads that help.
    """

    cut: Callable[..., int]
    append: Callable[..., None]
    attend: Callable[..., Any]


def build(own: Any, cross: Any) -> AttentionKernels:
    """Compile (or load) for these dtypes of the two pools, uint16 or float32."""
    counters, plain = new_counters(), np.zeros((1, 1, 1), np.float32)
    qkv, mixed = np.zeros((1, 3 * HEAD_DIM), np.float32), np.zeros((1, 1, 1, HEAD_DIM), np.float32)
    results, attended = (plain, plain.copy(), mixed), np.zeros((1, HEAD_DIM), np.float32)
    pages = [empty_pages(own, True), empty_pages(cross, False)]
    append(qkv, pages[0].pool, pages[0].last, 0)
    for number_of_calls, each in enumerate(pages):
        _attend(qkv, each, 0, results, attended, counters, 2 * number_of_calls, True)
    return AttentionKernels(cut, append, _attend)


def empty_pages(dtype: Any, causal: bool) -> Pages:
    """One row that attends to one position, to compile for."""
    indptr, zero, one = np.array([0, 1], np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    pieces, last = np.zeros((1, 7), np.int32), np.zeros((1, 2), np.int32)
    cut(indptr, indptr, zero, one, 2, causal, False, pieces, one.copy(), last)
    return Pages(np.zeros((1, 1, 2, 2, 1, HEAD_DIM), dtype), pieces, one, last)
