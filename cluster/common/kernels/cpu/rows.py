"""Kernels over rows of a residual stream, which both roles run. Imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cluster.common.kernels.cpu.arithmetic import number, stored
from cluster.common.model.layers import LAYER_NORM_EPS

# Sums may be reordered, but NaN stays defined: a row of NaN must not look valid.
SUMS = {"reassoc", "contract", "arcp", "nsz"}
_EPS = np.float32(LAYER_NORM_EPS)


@njit(fastmath=SUMS, nogil=True, cache=True)
def add_norm_row(row: Any, added: Any, weight: Any, bias: Any, normed: Any) -> None:
    """row += added, then normed = LayerNorm(row)."""
    d = len(row)
    share = np.float32(1) / np.float32(d)
    total = np.float32(0)
    for c in range(d):
        value = row[c] + number(added[c])
        row[c] = value
        total += value
    mean = total * share
    squares = np.float32(0)
    for c in range(d):
        off = row[c] - mean
        squares += off * off
    inverse = np.float32(1) / np.sqrt(squares * share + _EPS)
    for c in range(d):
        normed[c] = stored((row[c] - mean) * inverse * weight[c] + bias[c], normed[c])


@njit(nogil=True, cache=True)
def add_norm(x: Any, delta: Any, weight: Any, bias: Any, out: Any) -> None:
    """x += delta, then out = LayerNorm(x); on the calling thread.

    x float32 [n, d]; delta and out [n, d], float32 or bfloat16 as uint16; weight, bias float32 [d].
    """
    for r in range(len(x)):
        add_norm_row(x[r], delta[r], weight, bias, out[r])
