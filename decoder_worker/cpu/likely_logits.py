"""Logits that are exact wherever a token may be the likeliest, from a coarse head and the real one.

Words are computed in 8 bits first. Of each the logit is off by at most `error` times the length of
x, so a word whose logit is lower than another's by more than both bounds cannot be the likeliest.
All others are computed again from the weights themselves, and so are from the start the tokens from
end of text on, whose probabilities are compared as a sum. What is left from 8 bits counts in the
sum of probabilities alone, where its errors hardly show. Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.arithmetic import larger, number
from cluster.common.kernels.cpu.rows import SUMS
from decoder_worker.cpu.arrays import LOGITS
from decoder_worker.cpu.fused_kernels import begin_product, end_product, product
from decoder_worker.cpu.tile_products import lost_by_split
from decoder_worker.cpu.work_sharing import claim, finish, wait

_LOWEST = np.float32(-3.4e38)
_STRIDE = 512  # words that are looked at together
_ROUNDING = np.float32(2.0**-15)  # of a sum's terms, by which any of the products may be off
_LEAST_LENGTH = np.float32(1e-17)  # of x: squares of its values are normal numbers above it
_FINITE = {"reassoc", "contract", "nnan", "nsz"}


@njit(fastmath=_FINITE, nogil=True, cache=True)
def _highest(row: Any, error: Any, added: Any, length: Any, first: Any, last: Any) -> Any:
    """Of row + error * length + added. A negative length: of the least that a logit may be."""
    part, errors, more = row[first:last], error[first:last], added[first:last]
    found = _LOWEST
    for c in range(len(part)):
        found = larger(found, part[c] + errors[c] * length + more[c])
    return found


@njit(fastmath=SUMS, nogil=True, cache=True)
def _logit(x: Any, weight: Any) -> Any:
    total = np.float32(0)
    for c in range(len(x)):
        total += x[c] * number(weight[c])
    return total


@njit(fastmath=SUMS, nogil=True, cache=True)
def _squares(x: Any) -> Any:
    total = np.float32(0)
    for c in range(len(x)):
        total += x[c] * x[c]
    return total


@njit(nogil=True, cache=True)
def _refine(
    row: Any, x: Any, weight: Any, coarse: Any, tiles: Any, added: Any, always: Any, n_words: Any
) -> None:
    """Make the logits of words exact that may be the likeliest; row float32 [n_vocab], of x."""
    length = np.sqrt(_squares(x))
    if not np.isfinite(length):
        row[:n_words] = np.float32(np.nan)
        return
    lost = lost_by_split(tiles) * np.max(np.abs(x)) * np.sqrt(np.float32(len(x)))
    slack = coarse.longest * (lost + _ROUNDING * length)
    error = coarse.error
    least = _LOWEST  # of so short an x no bound holds: all words are computed that may be chosen
    if length >= _LEAST_LENGTH:
        least = _highest(row, error, added, -length, 0, n_words) - np.float32(2) * slack
    for begin in range(0, n_words, _STRIDE):
        end = min(n_words, begin + _STRIDE)
        if _highest(row, error, added, length, begin, end) < least:
            continue
        for c in range(begin, end):
            if row[c] + error[c] * length + added[c] >= least:
                row[c] = _logit(x, weight[c])
    for i in range(len(always)):
        if always[i] < n_words:
            row[always[i]] = _logit(x, weight[always[i]])


@njit(nogil=True, cache=True)
def run_likely(
    x: Any,
    head: Any,
    coarse: Any,
    added: Any,
    always: Any,
    n_words: Any,
    out: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    """Every thread of a team calls this; `n_likely_units` of units.

    x float32 [n, d]; added float32 [n_vocab], -inf for tokens that no step may choose, else 0;
    always int64, tokens whose logits are exact whatever they are; out float32 [n, n_vocab].
    """
    n_vocab = len(head.weight)
    n_coarse = (n_words + LOGITS - 1) // LOGITS
    n_exact = max(1, (n_vocab - n_words) // LOGITS)  # the last one takes what is over
    end = begin + n_coarse + n_exact
    rows = begin_product(x, head.weight, head.tiles)
    coarse_rows = begin_product(x, coarse.weight, head.tiles)
    while True:
        unit = claim(counters, end)
        if unit < 0:
            break
        index = unit - begin
        if index < n_coarse:
            first = index * LOGITS
            last = min(n_words, first + LOGITS)
            product(coarse_rows, coarse.weight, coarse.scale, head.tiles, first, last, out)
        else:
            first = n_words + (index - n_coarse) * LOGITS
            last = n_vocab if unit + 1 == end else first + LOGITS
            product(rows, head.weight, head.scale, head.tiles, first, last, out)
        finish(counters)
    end_product(head.tiles)
    if not wait(counters, end, leads):
        return
    begin, end = end, end + len(x)
    while True:
        unit = claim(counters, end)
        if unit < 0:
            break
        r = unit - begin
        _refine(out[r], x[r], head.weight, coarse, head.tiles, added, always, n_words)
        finish(counters)
    wait(counters, end, leads)
