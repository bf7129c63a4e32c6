"""Dynamic time warping that releases Python's lock, which a decoder's steps need. Imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def first_columns(x: Any) -> Any:
    """The column where the cheapest path through x float32 [n, m] enters each row: int64 [n].

    Steps and ties are openai/whisper's: diagonal or down only if strictly cheapest of the three,
    else along the row, even where that is dearer.
    """
    n, m = x.shape
    cost = np.full((n + 1, m + 1), np.inf, np.float32)
    cost[0, 0] = 0
    for i in range(n):
        for j in range(m):
            straight, down, along = cost[i, j], cost[i, j + 1], cost[i + 1, j]
            if straight < min(down, along):
                along = straight
            elif down < min(straight, along):
                along = down
            cost[i + 1, j + 1] = x[i, j] + along
    firsts = np.zeros(n, np.int64)
    i, j = n, m
    while i > 0 and j > 0:
        firsts[i - 1] = j - 1
        straight, down, along = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        if straight < min(down, along):
            i, j = i - 1, j - 1
        elif down < min(straight, along):
            i -= 1
        else:
            j -= 1
    return firsts
