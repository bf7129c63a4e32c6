"""Cross-attention K and V of whole windows, written into their pages by the product itself.

With a page per window each layer's K or V is one contiguous block, so a batched product can write
where a reader will look: a third of the traffic of a product that is scattered afterwards (246 MB
instead of 737 for a window of large-v3). Where the pages are is known to the host alone, so this is
launched behind the graph, which leaves the states in a buffer. Biases are rows of the weights, with
a column of ones in that buffer: a product that adds to its result would read it first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.model.layers import Linear

PAD = 8  # columns for the bias: products want multiples of 16 bytes


class WholeWindows:
    """Over one pool; in the order of one stream."""

    def __init__(self, fused: Linear, pool: Tensor, max_batch: int) -> None:
        """Copies the weights, in another order.

        Args:
            fused: K's and V's products of all layers as one, in the pool's dtype.
            pool: [n_pages, L, 2, n_audio_ctx, H, Dh]; it must outlive this.
        """
        assert fused.bias is not None  # V has one
        n_blocks = pool.shape[1] * pool.shape[2]
        n_out, n = fused.weight.shape
        d = n_out // n_blocks
        self._pool = pool
        self._weight = pool.new_zeros(n_blocks, n + PAD, d)
        self._weight[:, :n] = fused.weight.view(-1, d, n).transpose(1, 2)
        self._weight[:, n] = fused.bias.view(-1, d)
        self._rows = pool.new_zeros(max_batch, pool.shape[3], n + PAD)
        self._rows[:, :, n] = 1

    def keep(self, states: Tensor) -> None:
        """states [B, T, n_audio_state], for `write`; a graph may hold it."""
        n_windows, n_frames, n = states.shape
        self._rows[:n_windows, :n_frames, :n].copy_(states)

    def write(self, pages: Sequence[int], n_frames: int) -> None:
        """Project the first windows that were kept, each into its page. Mutates the pool."""
        for rows, page in zip(self._rows, pages, strict=False):
            blocks = self._pool[page].flatten(0, 1).flatten(2)[:, :n_frames]  # [L * 2, T, d]
            alike = rows[:n_frames].expand(len(blocks), -1, -1)
            torch.bmm(alike, self._weight, out=blocks)
