"""The head in 8 bits: half of the bytes tell which tokens can be the likeliest at all.

A decode step of few rows is bound by reading weights, and the head is the largest of them. So the
logits of words are first computed from this copy, whose errors are bounded by what each output's
weights have lost; only those tokens that may be the likeliest within these bounds are computed from
the weights themselves (`likely_logits`). Knows no numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.tile_registers import TILE_ROW_BYTES
from cluster.common.model.dims import ModelDims
from cluster.common.model.layers import quantize_rows
from decoder_worker.cpu.tile_blocks import BLOCK_OUTPUTS, in_blocks

ROWS_AT_ONCE = 4096  # of the vocabulary that are converted, so that little memory is taken
LEAST_EXACT = BLOCK_OUTPUTS  # tokens from end of text on, which one product computes
LEAST_VOCAB = 8192  # with fewer tokens the head is not what a step waits for
_ROUNDED = 1 + 1e-5  # so that no bound is below the exact one for being a float32


class CoarseHead(NamedTuple):
    """weight int8 [n_vocab, d]; for tiles `in_blocks`, with zeros behind the last output.

    scale: float32 [n_vocab], of each output's weights.
    error: float32 [n_vocab], the length of the difference between an output's weights and these:
        times the length of x, the most that a logit can be off.
    longest: float32, the greatest length of an output's weights.
    tiles: as in `fused_arrays.Layers`.
    """

    weight: Any
    scale: Any
    error: Any
    longest: Any
    tiles: Any


def fits_coarse(dims: ModelDims) -> bool:
    """Whether a coarse head is of use for a model of this size."""
    return dims.n_vocab >= LEAST_VOCAB and dims.n_text_state % TILE_ROW_BYTES == 0


def coarse_head(weight: Tensor, tiles: Any = None) -> CoarseHead:
    """Of weight [n_vocab, d], in 16 bits."""
    n_vocab, d = weight.shape
    quantized = torch.zeros(n_vocab, d, dtype=torch.int8)
    scale, error = torch.empty(n_vocab), torch.empty(n_vocab)
    longest = 0.0
    for begin in range(0, n_vocab, ROWS_AT_ONCE):
        rows = slice(begin, min(n_vocab, begin + ROWS_AT_ONCE))
        exact = weight[rows].float()
        quantized[rows], scale[rows] = quantize_rows(exact)
        longest = max(longest, exact.norm(dim=1).max().item())
        near = quantized[rows].float().mul_(scale[rows, None])
        error[rows] = exact.sub_(near).norm(dim=1) * _ROUNDED
    array = quantized.numpy()
    return CoarseHead(
        array if tiles is None else in_blocks(array),
        scale.numpy(),
        error.numpy(),
        np.float32(longest * _ROUNDED),
        tiles,
    )
