"""The choice of each row's next token on a CPU in one pass: rules, argmax, probability, slot.

It is what `TorchSampler` does for rows without noise. Imports numba: `decoder_worker.cpu.sampler`
builds this in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int32, njit

from cluster.jit.arithmetic import LOG2_E, exp2
from cluster.jit.rows import SUMS
from decoder_worker.sampling.logit_rules import Marks
from decoder_worker.sampling.slots import (
    BEFORE_IS,
    LAST_IS,
    LAST_TIMESTAMP,
    LIMIT,
    N_COLUMNS,
    N_SAMPLED,
    POSITION,
    TIMED,
    TOKEN,
)

_NEVER = np.float32(-np.inf)
_STRIDE = 512  # of the search for the place of the highest logit


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
    eot, stamps = marks.eot, marks.timestamp_begin
    n_vocab = logits.shape[1]
    for r in range(len(index)):
        row, slot = logits[r], table[index[r]]
        n_sampled, timed = slot[N_SAMPLED], slot[TIMED] != 0
        last_is, before_is = slot[LAST_IS] != 0, slot[BEFORE_IS] != 0
        has_nan = _has_nan(row)
        _suppress(row, suppressed)
        if n_sampled == 0:
            for i in range(len(begin)):
                row[begin[i]] = _NEVER
        # Where a token may come from: words, text (from end of text on), timestamps.
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
        slot[TOKEN] = token
        if token != eot and n_sampled + 1 < slot[LIMIT]:
            slot[POSITION] += 1
        slot[N_SAMPLED] = n_sampled + 1
        if token >= stamps:
            slot[LAST_TIMESTAMP] = token - stamps
        slot[BEFORE_IS] = 1 if last_is or n_sampled == 0 else 0
        slot[LAST_IS] = 1 if token >= stamps else 0


def build() -> Callable[..., None]:
    """Compile (or load) sample(logits, index, table, suppressed, begin, marks, tokens, logprobs).

    logits float32 [n, n_vocab], changed; index int64 [n]; table the slots' int64, changed;
    suppressed float32 [n_vocab] and begin int64 as `LogitRules` has them; writes tokens int64 [n]
    and logprobs float32 [n].
    """
    logits, plain, ids = (
        np.zeros((4, 8), np.float32),
        np.zeros(4, np.float32),
        np.zeros(4, np.int64),
    )
    table = np.zeros((1, N_COLUMNS), np.int64)
    _sample(logits, ids, table, logits[0].copy(), ids, Marks(4, 5, 6, 1), ids.copy(), plain)
    return _sample
