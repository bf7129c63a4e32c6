"""From where tokens look in the audio to one monotonic path: filters and dynamic time warping.

The steps and their order are openai/whisper's (`timing.py`). Knows matrices only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

MEDIAN_WIDTH = 7  # frames, 140 ms

# Exchanges that bring the median of seven to the middle: Devillard, "Fast median search", 1998.
# fmt: off
_MEDIAN_NETWORK = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
    (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)
# fmt: on


def standardise(weights: Tensor) -> Tensor:
    """Each frame's weights [heads, tokens, frames] against those of the other tokens.

    A frame at which all tokens look alike says nothing: 0, where openai/whisper has NaN.
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    scaled = (weights - mean) / std
    return torch.where(std == 0, torch.zeros_like(scaled), scaled)


def median_filter(x: Tensor) -> Tensor:
    """Running median over frames, mirrored at both ends; x [heads, tokens, frames] float.

    Too few frames to mirror stay as they are. An exchange network takes a sixth of a sort's time.
    """
    reach = MEDIAN_WIDTH // 2
    n_frames = x.shape[-1]
    if n_frames <= reach:
        return x
    padded = F.pad(x, (reach, reach), mode="reflect")
    lanes = [padded[..., shift : shift + n_frames] for shift in range(MEDIAN_WIDTH)]
    for low, high in _MEDIAN_NETWORK:
        a, b = lanes[low], lanes[high]
        lanes[low], lanes[high] = torch.minimum(a, b), torch.maximum(a, b)
    return lanes[reach]


def first_columns(x: NDArray[np.float32]) -> list[int]:
    """Dynamic time warping: where the cheapest path through x [n, m] enters each of its rows.

    Costs are summed anti-diagonal by anti-diagonal, for then a diagonal is one vector operation:
    1724 of them for 225 rows of 1500 columns. Steps and ties are openai/whisper's: straight or
    down only if strictly cheapest of the three, else along the row, even where that is dearer.
    """
    n, m = x.shape
    skewed = np.zeros((n + m - 1, n), dtype=np.float32)  # [i + j, i]
    for i, row in enumerate(x):
        skewed[i : i + m, i] = row
    cost = np.full((n + m + 1, n + 1), np.inf, dtype=np.float32)  # [i + j, i], both from 1
    cost[0, 0] = 0.0
    least = np.empty(n, dtype=np.float32)
    is_least, differs = np.empty(n, dtype=np.bool_), np.empty(n, dtype=np.bool_)
    for diagonal in range(2, n + m + 1):
        straight, down = cost[diagonal - 2, :-1], cost[diagonal - 1, :-1]
        along, out = cost[diagonal - 1, 1:], cost[diagonal, 1:]
        np.minimum(straight, down, out=least)
        np.less(least, along, out=is_least)
        np.not_equal(straight, down, out=differs)
        np.logical_and(is_least, differs, out=is_least)
        out[:] = along
        np.copyto(out, least, where=is_least)
        np.add(out, skewed[diagonal - 2], out=out)
    return _trace_back(cost, n, m)


def _trace_back(cost: NDArray[np.float32], n: int, m: int) -> list[int]:
    """First column of each row on the path that ends at (n, m); cost is [i + j, i]."""
    firsts = [0] * n
    i, j = n, m
    while i > 0 and j > 0:
        firsts[i - 1] = j - 1
        straight, down = cost[i + j - 2, i - 1], cost[i + j - 1, i - 1]
        along = cost[i + j - 1, i]
        if straight < min(down, along):
            i, j = i - 1, j - 1
        elif down < min(straight, along):
            i -= 1
        else:
            j -= 1
    return firsts
