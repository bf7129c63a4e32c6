"""Compares two lists of words. A second for ten thousand with nine thousand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cluster.common.errors import InvalidRequestError

BAND = 256  # words by which the comparison may stray beyond the difference in length
MOST_CELLS = 100_000_000  # of a comparison, a byte each


class Step(NamedTuple):
    """Numbers of a pair of words, or of a word that only one side has."""

    left: int | None
    right: int | None
    is_equal: bool = False


def compared(left: Sequence[str], right: Sequence[str]) -> list[Step]:
    """The cheapest edit: insertion and deletion cost 2 and substitution 3, for more equal pairs.
    Raises InvalidRequestError if more than `MOST_CELLS` lie within `BAND` of the diagonals.
    """
    numbers: dict[str, int] = {}
    a, b = (
        np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
        for words in (left, right)
    )
    n, m = len(a), len(b)
    low, high = min(0, m - n) - BAND, max(0, m - n) + BAND
    width = high - low + 1
    if (n + 1) * width > MOST_CELLS:
        raise InvalidRequestError(
            f"the text has {n} words and the audio {m}: they are too many, or differ by too many, "
            "to be compared. Send the audio in parts, each with its own text.",
            param="text",
            code="text_too_different",
        )
    far = np.int64(4 * (n + m + width))
    others = np.full(n + m + 2 * width, -1, np.int64)  # b, so that a row is one slice of it
    others[width : width + m] = b
    columns = np.arange(low, high + 1)
    moves = np.empty((n + 1, width), np.uint8)  # 0: a pair; 1: of a alone; 2: of b alone
    steps = 2 * np.arange(width)
    cost = np.where((columns >= 0) & (columns <= m), 2 * columns, far)
    moves[0] = 2
    for i in range(1, n + 1):
        first = width + i + low - 1  # of `others`, for the row's first column
        pair = cost + np.where(others[first : first + width] == a[i - 1], 0, 3)
        down = np.append(cost[1:], far) + 2
        best = np.minimum(pair, down)
        at = columns + i
        best[(at < 0) | (at > m)] = far
        best[at == 0] = 2 * i
        cost = np.minimum.accumulate(best - steps) + steps
        moves[i] = np.where(cost == pair, 0, np.where(cost == down, 1, 2))
        moves[i][at == 0] = 1
        cost[(at < 0) | (at > m)] = far
    found = []
    i, j = n, m
    while i or j:
        move = moves[i, j - i - low]
        i, j = i - (move != 2), j - (move != 1)
        is_equal = bool(move == 0 and a[i] == b[j])
        found.append(Step(i if move != 2 else None, j if move != 1 else None, is_equal))
    return found[::-1]
