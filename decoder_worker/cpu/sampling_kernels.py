"""Greedy choice of each row's next token on a CPU, equal to `TorchSampler`'s.

Threads share out the rows (`work_sharing`). Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, njit

from cluster.common.kernels.cpu.arithmetic import LOG2_E, exp2, larger
from cluster.common.kernels.cpu.rows import SUMS
from decoder_worker.cpu.work_sharing import claim, finish, wait
from decoder_worker.sampling.slots import (
    BEFORE_IS,
    LAST_IS,
    LAST_TIMESTAMP,
    LIMIT,
    N_SAMPLED,
    POSITION,
    TIMED,
    TOKEN,
)

_NEVER = np.float32(-np.inf)
_LOWEST = np.float32(-3.4e38)  # below any logit
_STRIDE = 512  # of the search for the highest logit


@njit(nogil=True, cache=True)
def _suppress(row: Any, suppressed: Any) -> Any:
    """Add `suppressed` to a row; returns whether the row had a NaN."""
    count = int32(0)
    for c in range(len(row)):
        count += int32(row[c] != row[c])
        row[c] += suppressed[c]
    return count > 0


@njit(fastmath=True, nogil=True, cache=True)
def _highest(row: Any, first: Any, last: Any) -> Any:
    """The highest of finite numbers and -inf, at least _LOWEST."""
    part, found = row[first:last], _LOWEST
    for c in range(len(part)):
        found = larger(found, part[c])
    return found


@njit(fastmath=SUMS, nogil=True, cache=True)
def _sum_exp(row: Any, first: Any, last: Any, top: Any) -> Any:
    part, total = row[first:last], np.float32(0)
    for c in range(len(part)):
        total += exp2((part[c] - top) * np.float32(LOG2_E))
    return total


@njit(nogil=True, cache=True)
def _place(row: Any, first: Any, last: Any, value: Any) -> Any:
    while first + _STRIDE < last and _highest(row, first, first + _STRIDE) < value:
        first += _STRIDE
    while row[first] != value:
        first += 1
    return first


@njit(nogil=True, cache=True)
def _sample_row(row: Any, slot: Any, suppressed: Any, begin: Any, marks: Any) -> Any:
    """Return the token and its log probability; changes `row`, its logits, and `slot`."""
    eot, stamps, n_vocab = marks.eot, marks.timestamp_begin, len(row)
    n_sampled, timed = slot[N_SAMPLED], slot[TIMED] != 0
    last_is, before_is = slot[LAST_IS] != 0, slot[BEFORE_IS] != 0
    has_nan = _suppress(row, suppressed)
    if n_sampled == 0:
        for i in range(len(begin)):
            row[begin[i]] = _NEVER
    # The allowed spans: words, text (from end of text on), timestamps.
    low, high = stamps, n_vocab
    words_end, text_end = eot, stamps
    if timed:
        row[marks.no_timestamps] = _NEVER
        ends_segment = last_is and not before_is
        low = stamps + max(0, slot[LAST_TIMESTAMP] + (0 if ends_segment else 1))
        if last_is and before_is:
            high = low
        elif n_sampled == 0:
            high = min(high, stamps + marks.latest_first + 1)
        low = min(low, high)
        if ends_segment:
            words_end = 0
    top_word = _highest(row, 0, words_end)
    top_text = _highest(row, eot, text_end)
    top_stamp = _highest(row, low, high)
    if timed:
        stamps_only = n_sampled == 0
        if low < high and not stamps_only:
            together = np.log(_sum_exp(row, low, high, top_stamp)) + top_stamp
            stamps_only = together > max(top_word, top_text)
        if stamps_only:
            words_end, text_end = 0, eot
            top_word = top_text = _LOWEST
    top = max(top_word, top_text, top_stamp)
    token, logprob = 0, np.float32(np.nan)
    if not (has_nan or not np.isfinite(top) or top <= np.float32(-3.3e38)):
        total = _sum_exp(row, 0, words_end, top) + _sum_exp(row, eot, text_end, top)
        total += _sum_exp(row, low, high, top)
        if top_word == top:
            token = _place(row, 0, words_end, top)
        elif top_text == top:
            token = _place(row, eot, text_end, top)
        else:
            token = _place(row, low, high, top)
        logprob = -np.log(total)
    # As `slots.advance` writes it.
    slot[TOKEN] = token
    if token != eot and n_sampled + 1 < slot[LIMIT]:
        slot[POSITION] += 1
    slot[N_SAMPLED] = n_sampled + 1
    if token >= stamps:
        slot[LAST_TIMESTAMP] = token - stamps
    slot[BEFORE_IS] = 1 if last_is or n_sampled == 0 else 0
    slot[LAST_IS] = 1 if token >= stamps else 0
    return token, logprob


@njit(nogil=True, cache=True)
def sample_rows(
    logits: Any,
    index: Any,
    table: Any,
    suppressed: Any,
    banned_first: Any,
    marks: Any,
    tokens: Any,
    logprobs: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    """Sample all rows, a unit each; every thread of a team calls this.

    logits: float32 [n, n_vocab], changed. index: int64 [n]. table: the slots' int64, changed.
    suppressed: float32 [n_vocab] and banned_first: int64, as in `LogitRules`. Writes tokens int64
    [n] and logprobs float32 [n].
    """
    end = begin + len(index)
    while True:
        unit = claim(counters, end)
        if unit < 0:
            break
        r = unit - begin
        slot = table[index[r]]
        tokens[r], logprobs[r] = _sample_row(logits[r], slot, suppressed, banned_first, marks)
        finish(counters)
    wait(counters, end, leads)
