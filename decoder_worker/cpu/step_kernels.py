"""What a decode step on a CPU does besides attention and layers' products, each one pass.

Imports numba: `decoder_worker.model` builds this in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import int32, njit, prange

from cluster.jit.arithmetic import LOG2_E, exp2, half_number
from cluster.jit.background import on_torch_threads
from cluster.jit.rows import SUMS, add_norm

_NEVER = np.float32(-np.inf)
_LN_2 = np.float32(0.6931471805599453)
_BLOCK = 128  # vocabulary rows whose weights stay in a core's cache for all rows of a batch
_STRIDE = 512  # of the search for the place of the highest logit


@dataclass(frozen=True, slots=True)
class StepKernels:
    """add_norm: `cluster.jit.rows`.

    logits(x, weight, out): out = x @ weight.T, as sums in float32. x float32 [n, d]; weight the
        bits of float16, uint16 [n_vocab, d]; out float32 [n, n_vocab]. On all of torch's threads.
    sample(logits, index, table, suppressed, begin, marks, tokens, logprobs): what `Sampler` does
        for rows without noise. logits float32 [n, n_vocab], changed; index int64 [n]; table the
        slots' int64, in the columns that `decoder_worker.sampling.slots` has; suppressed float32
        [n_vocab], begin int64, as `LogitRules` has them; marks int64 (end of text, no timestamps,
        first timestamp, highest first timestamp); writes tokens int64 [n] and logprobs float32 [n].
    """

    add_norm: Callable[..., None]
    logits: Callable[..., None]
    sample: Callable[..., None]


@njit(fastmath=SUMS, nogil=True, cache=True)
def _logits_of_one(x: Any, weight: Any, first: Any, last: Any, out: Any) -> None:
    for n in range(first, last):
        row = weight[n]
        a = np.float32(0)
        for c in range(len(row)):
            a += x[c] * half_number(row[c])
        out[n] = a


@njit(fastmath=SUMS, nogil=True, cache=True)
def _logits_of_four(x: Any, weight: Any, first: Any, last: Any, out: Any) -> None:
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    for n in range(first, last):
        row = weight[n]
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(row)):
            w = half_number(row[i])
            a += x0[i] * w
            b += x1[i] * w
            c += x2[i] * w
            d += x3[i] * w
        out0[n], out1[n], out2[n], out3[n] = a, b, c, d


@njit(nogil=True, cache=True)
def _logits_block(block: Any, x: Any, weight: Any, out: Any) -> None:
    first = block * _BLOCK
    last = min(len(weight), first + _BLOCK)
    row = 0
    while row + 4 <= len(x):
        _logits_of_four(x[row : row + 4], weight, first, last, out[row : row + 4])
        row += 4
    while row < len(x):
        _logits_of_one(x[row], weight, first, last, out[row])
        row += 1


@njit(nogil=True, cache=True)
def _logits_alone(x: Any, weight: Any, out: Any) -> None:
    for block in range((len(weight) + _BLOCK - 1) // _BLOCK):
        _logits_block(block, x, weight, out)


@njit(parallel=True, nogil=True, cache=True)
def _logits_together(x: Any, weight: Any, out: Any) -> None:
    for block in prange((len(weight) + _BLOCK - 1) // _BLOCK):
        _logits_block(block, x, weight, out)


@njit(nogil=True, cache=True)
def _has_nan(row: Any) -> Any:
    count = int32(0)
    for c in range(len(row)):
        count += int32(row[c] != row[c])
    return count > 0


@njit(fastmath=True, nogil=True, cache=True)
def _highest(row: Any, first: Any, last: Any) -> Any:
    """Of finite numbers and -inf; -inf where there is none."""
    found = np.float32(-3.4e38)
    for c in range(first, last):
        found = max(found, row[c])
    return found


@njit(fastmath=SUMS, nogil=True, cache=True)
def _sum_exp(row: Any, first: Any, last: Any, top: Any) -> Any:
    """Of exp(row - top)."""
    total = np.float32(0)
    for c in range(first, last):
        total += exp2((row[c] - top) * np.float32(LOG2_E))
    return total


@njit(nogil=True, cache=True)
def _place(row: Any, first: Any, last: Any, value: Any) -> Any:
    """The first place of `value`, which is there."""
    while first + _STRIDE < last and _highest(row, first, first + _STRIDE) < value:
        first += _STRIDE
    while row[first] != value:
        first += 1
    return first


@njit(fastmath=SUMS, nogil=True, cache=True)
def _suppress(row: Any, suppressed: Any) -> None:
    for c in range(len(row)):
        row[c] += suppressed[c]


@njit(nogil=True, cache=True)
def _sample(
    logits: Any,
    index: Any,
    table: Any,
    suppressed: Any,
    begin: Any,
    marks: Any,
    tokens: Any,
    logprobs: Any,
) -> None:
    eot, no_timestamps, stamps, latest_first = marks[0], marks[1], marks[2], marks[3]
    n_vocab = logits.shape[1]
    for r in range(len(index)):
        row, slot = logits[r], table[index[r]]
        position, n_sampled, last_stamp = slot[1], slot[2], slot[3]
        last_is, before_is, timed, limit = slot[4] != 0, slot[5] != 0, slot[6] != 0, slot[7]
        has_nan = _has_nan(row)
        _suppress(row, suppressed)
        if n_sampled == 0:
            for i in range(len(begin)):
                row[begin[i]] = _NEVER
        # Where a token may come from: words, text (from end of text on), timestamps.
        low, high = stamps, n_vocab
        words_end, text_end = eot, stamps
        if timed:
            row[no_timestamps] = _NEVER
            ends_segment = last_is and not before_is
            low = stamps + max(0, last_stamp + (0 if ends_segment else 1))
            if last_is and before_is:
                high = low
            elif n_sampled == 0:
                high = min(high, stamps + latest_first + 1)
            low = min(low, high)
            if ends_segment:
                words_end = 0
            best = max(_highest(row, 0, words_end), _highest(row, eot, text_end))
            top = _highest(row, low, high)
            stamps_only = n_sampled == 0
            if low < high and not stamps_only:
                together = np.log(_sum_exp(row, low, high, top)) + top
                stamps_only = together > best
            if stamps_only:
                words_end, text_end = 0, eot
        top_word = _highest(row, 0, words_end)
        top_text = _highest(row, eot, text_end)
        top_stamp = _highest(row, low, high)
        top = max(top_word, top_text, top_stamp)
        if has_nan or not np.isfinite(top) or top <= np.float32(-3.3e38):
            tokens[r], logprobs[r] = 0, np.float32(np.nan)
        else:
            total = _sum_exp(row, 0, words_end, top) + _sum_exp(row, eot, text_end, top)
            total += _sum_exp(row, low, high, top)
            if top_word == top:
                tokens[r] = _place(row, 0, words_end, top)
            elif top_text == top:
                tokens[r] = _place(row, eot, text_end, top)
            else:
                tokens[r] = _place(row, low, high, top)
            logprobs[r] = -np.log(total)
        # What the next step needs of it, as `SlotTable.advance` writes it.
        token = tokens[r]
        slot[0] = token
        if token != eot and n_sampled + 1 < limit:
            slot[1] = position + 1
        slot[2] = n_sampled + 1
        if token >= stamps:
            slot[3] = token - stamps
        slot[5] = 1 if last_is or n_sampled == 0 else 0
        slot[4] = 1 if token >= stamps else 0


def build(own: Any) -> StepKernels:
    """Compile (or load) the kernels for a decoder that computes in `own`, uint16 or float32."""
    x, plain = np.zeros((4, 4), np.float32), np.zeros(4, np.float32)
    add_norm(x, np.zeros((4, 4), own), plain, plain, np.zeros((4, 4), own))
    add_norm(x, np.zeros((4, 4), own), plain, plain, x.copy())
    weight, logits = np.zeros((8, 4), np.uint16), np.zeros((4, 8), np.float32)
    for kernel in (_logits_alone, _logits_together):
        kernel(x, weight, logits)
    marks, ids = np.array([4, 5, 6, 1]), np.zeros(4, np.int64)
    _sample(
        logits, ids, np.zeros((1, 9), np.int64), logits[0].copy(), ids, marks, ids.copy(), plain
    )
    return StepKernels(add_norm, on_torch_threads(_logits_together, _logits_alone), _sample)
