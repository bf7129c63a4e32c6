"""How some queries of a window attend to all its keys on a CPU: one way for each kind of CPU."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.cpu.background import as_array
from cluster.common.kernels.cpu.tile_registers import tile_config
from encoder_worker.cpu.attention_steps import HEAD_DIM, KEYS
from encoder_worker.cpu.team_kernels import TeamKernels

SCORES_BYTES = 1 << 22  # of the heads that a unit attends with at a time
LOG2_E = math.log2(math.e)


class Attention(Protocol):
    """Computes on the calling thread; used by many at a time.

    key_multiple: memory has room for a multiple of so many keys, and zeros behind the last.
    values_by_dim: values lie as [H, Dh, T], and are given as a view of that.
    centres_keys: keys come without their mean, which softmax does not see.
    """

    key_multiple: int
    values_by_dim: bool
    centres_keys: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n_keys: int) -> Tensor:
        """Some queries over all keys.

        Args:
            q: [H, n, Dh], contiguous.
            k, v: [H, T, Dh], T at least n_keys.

        Returns:
            [n, H * Dh] in their dtype.
        """
        ...


def make_attention(kernels: TeamKernels, dtype: torch.dtype, head_dim: int) -> Attention:
    if kernels.attend is not None and dtype == torch.bfloat16 and head_dim == HEAD_DIM:
        return TileAttention(kernels)
    return ProductAttention(kernels)


class ProductAttention:
    """By torch's own kernel, or in bfloat16 by oneDNN's products.

    Torch's own takes no bfloat16 instructions without AMX. Of bfloat16 scores are rounded between
    the two products, so keys come centred: what is rounded is smaller.
    """

    key_multiple, values_by_dim, centres_keys = 1, False, True

    def __init__(self, kernels: TeamKernels) -> None:
        self._kernels = kernels

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n_keys: int) -> Tensor:
        if q.dtype == torch.float32:
            # With a batch in front: without one torch takes its slow way, through all scores.
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            return mixed.transpose(0, 1).flatten(1)
        n_head, n, head_dim = q.shape
        most = max(1, SCORES_BYTES // (n * n_keys * q.itemsize))
        step = next(n_heads for n_heads in range(most, 0, -1) if n_head % n_heads == 0)
        scores, out = q.new_empty(step, n, n_keys), q.new_empty(n, n_head * head_dim)
        sums = np.empty(step * n, dtype=np.float32)
        flat, columns, keys = as_array(scores.flatten(0, 1)), as_array(out), k.transpose(1, 2)
        for first in range(0, n_head, step):
            heads = slice(first, first + step)
            torch.bmm(q[heads], keys[heads], out=scores)
            self._kernels.softmax(flat, sums, np.float32(head_dim**-0.5 * LOG2_E))
            mixed = torch.bmm(scores, v[heads])
            self._kernels.join(as_array(mixed), sums, first, columns)
        return out


class TileAttention:
    """By the CPU's tiles in bfloat16: scores stay float32, and in a core's cache."""

    key_multiple, values_by_dim, centres_keys = KEYS, True, False

    def __init__(self, kernels: TeamKernels) -> None:
        assert kernels.attend is not None
        self._attend: Any = kernels.attend
        self._config = tile_config()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n_keys: int) -> Tensor:
        n_head, n, head_dim = q.shape
        out = q.new_empty(n, n_head * head_dim)
        self._attend(
            as_array(q).view(np.uint32),
            as_array(k),
            as_array(v.transpose(1, 2)),
            n_keys,
            np.float32(head_dim**-0.5 * LOG2_E),
            self._config,
            as_array(out).view(np.uint32),
        )
        return out
