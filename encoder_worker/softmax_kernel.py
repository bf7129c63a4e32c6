"""The softmax of attention scores in place, in bfloat16, as one pass over memory that is in cache.

Imports numba: `encoder_worker.attention` builds it in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int32, njit, prange

from cluster.model.jit import on_torch_threads
from cluster.model.jit_math import bfloat16_bits, exp2, number

Softmax = Callable[[Any, Any, float], None]


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def _exp_rows(scores: Any, inverse_sums: Any, log2_scale: Any) -> None:
    n_rows, n_columns = scores.shape
    for r in prange(n_rows):
        row = scores[r]
        # Sign and magnitude compare like an integer once the magnitude of negatives is flipped:
        # a maximum of integers becomes vector instructions, one of floats does not.
        highest = int32(-0x8000)
        for c in range(n_columns):
            bits = int32(np.int16(row[c]))
            highest = max(highest, bits ^ ((bits >> 31) & 0x7FFF))
        bits = highest ^ ((highest >> 31) & 0x7FFF)
        top = number(np.uint16(bits & 0xFFFF)) * log2_scale
        total = np.float32(0)
        for c in range(n_columns):
            e = exp2(number(row[c]) * log2_scale - top)
            total += e
            row[c] = bfloat16_bits(e)
        inverse_sums[r] = np.float32(1) / total


def build() -> Softmax:
    """Compile (or load) the kernel: `(scores, inverse_sums, log2_scale)`.

    scores: uint16 [n_rows, n_columns], bfloat16 bits; becomes 2 ** (log2_scale * (score - its row's
    highest)). inverse_sums: float32 [n_rows], written.
    """
    _exp_rows(np.zeros((1, 16), np.uint16), np.zeros(1, np.float32), np.float32(1))
    return on_torch_threads(_exp_rows)
