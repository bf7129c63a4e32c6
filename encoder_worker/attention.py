"""Self-attention over a window's positions: torch's SDPA, or in blocks on a CPU with bfloat16.

Torch's own CPU kernel takes no bfloat16 instructions without AMX: half of an encoder's time. In
blocks of queries both products are oneDNN's, which does, and the scores stay in cache. Scores are
rounded to bfloat16 in between, so keys are centred first: softmax does not see the difference, and
what is rounded is smaller.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.model.jit import InBackground, as_array

BLOCK = 125  # queries whose scores (3 MB with 8 heads) are in cache at a time; divides 1500
LOG2_E = 1.4426950408889634

Attention = Callable[[Tensor, int], Tensor]


def make_attention(device: torch.device | str, dtype: torch.dtype) -> Attention:
    """The fastest for this device and dtype: takes qkv [B, T, 3 * d] and heads, gives [B, T, d]."""
    if torch.device(device).type == "cpu" and dtype == torch.bfloat16:
        return BlockAttention()
    return sdpa


def sdpa(qkv: Tensor, n_head: int) -> Tensor:
    """Any device and dtype."""
    heads = qkv.view(*qkv.shape[:2], 3, n_head, -1)  # [B, T, 3, H, Dh]
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, Dh]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, T, d]


class BlockAttention:
    """bfloat16 on a CPU. For one thread at a time."""

    def __init__(self) -> None:
        self._softmax = InBackground("encoder", _build_softmax)

    def __call__(self, qkv: Tensor, n_head: int) -> Tensor:
        return torch.stack([self._window(window, n_head) for window in qkv])

    def wait(self, timeout_s: float) -> bool:
        """Whether the compiled softmax is there, after at most `timeout_s`."""
        return self._softmax.wait(timeout_s) is not None

    def _window(self, qkv: Tensor, n_head: int) -> Tensor:
        """qkv [T, 3 * d] -> [T, d]."""
        n, softmax = len(qkv), self._softmax.get()
        q, k, v = qkv.view(n, 3, n_head, -1).permute(1, 2, 0, 3).contiguous()  # [H, T, Dh]
        keys = (k - k.float().mean(1, keepdim=True)).to(k.dtype).transpose(1, 2)  # [H, Dh, T]
        scale = q.shape[-1] ** -0.5
        out = torch.empty_like(qkv[:, : qkv.shape[1] // 3]).view(n, n_head, -1)
        block = BLOCK if n % BLOCK == 0 else n
        scores = qkv.new_empty(n_head, block, n)
        sums = np.empty(n_head * block, dtype=np.float32)
        inverse = torch.from_numpy(sums).view(n_head, block, 1)
        flat = as_array(scores.view(-1, n))
        for begin in range(0, n, block):
            torch.bmm(q[:, begin : begin + block], keys, out=scores)
            target = out[begin : begin + block].transpose(0, 1)  # [H, block, Dh]
            if softmax is None:
                weights = (scores.float() * scale).softmax(-1).to(v.dtype)
                target.copy_(torch.bmm(weights, v))
            else:
                softmax(flat, sums, np.float32(scale * LOG2_E))
                torch.mul(torch.bmm(scores, v), inverse, out=target)
        return out.flatten(1)


def _build_softmax() -> Callable[..., None]:
    from encoder_worker.softmax_kernel import build

    return build()
