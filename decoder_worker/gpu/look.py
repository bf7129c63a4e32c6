"""The forwards of the check at start, on noise, by one layer and the head.

They are a short and a long prompt, and for the attention of each kind of bucket a step, rows that
share a window, and a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cluster.common.kernels.gpu.self_check import in_float32, noise
from cluster.common.model.layers import Linear
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.model import TextDecoder, TorchDecoder, WideHead

PROMPTS = (4, 72)  # tokens: products of few rows and of many are other kernels of the library
FIXED = ((2, 1, 1), (2, 1, 2), (1, 4, 1))  # rows, tokens of each, rows of a window
HISTORY = 2  # positions before those of a step
N_LOGITS = 2  # rows that are brought to logits

MakeFixed = Callable[[int, int, int], TextDecoder]


@torch.inference_mode()
def steps(
    ragged: TextDecoder, fixed: MakeFixed | None, self_pool: Tensor, cross_pool: Tensor
) -> list[Tensor]:
    """States and logits of each forward. Overwrites the pools' first pages.

    ragged: for prompts of any length. fixed: makes a decoder of (rows, tokens of each row, rows
    that share a window); None: there are no buckets.
    """
    page_tokens, page_frames = self_pool.shape[3], cross_pool.shape[3]
    n_pages = fill(self_pool, cross_pool)
    longest = n_pages * page_tokens
    found = []
    for n_rows, n_tokens, n_sharing in (*((1, min(n, longest), 1) for n in PROMPTS), *FIXED):
        is_step = n_tokens == 1
        begin = HISTORY if is_step else 0
        counts, entries = [n_tokens] * n_rows, n_rows // n_sharing
        own = [range(n_pages), [n_pages]][:n_rows]
        batch = AttentionBatch(
            PagedKV.make(counts, own, [begin + n_tokens] * n_rows, page_tokens),
            PagedKV.make(
                [n_tokens * n_sharing] * entries,
                [[0]] * entries,
                [page_frames] * entries,
                page_frames,
            ),
        )
        is_fixed = (n_rows, n_tokens, n_sharing) in FIXED
        decoder = fixed(n_rows, n_tokens, n_sharing) if fixed is not None and is_fixed else ragged
        device = self_pool.device
        tokens = torch.arange(n_rows * n_tokens, device=device)
        positions = torch.arange(begin, begin + n_tokens, device=device).repeat(n_rows)
        decoder.plan(batch)
        states = decoder.states(tokens, positions)
        found += [states, decoder.logits(states[-N_LOGITS:])]
    return found


def exact_steps(decoder: TorchDecoder, self_pool: Tensor, cross_pool: Tensor) -> list[Tensor]:
    """Like `steps`, in float32 on the CPU."""
    n_pages = fill(self_pool, cross_pool)
    parts = (self_pool[: n_pages + 1, :1], cross_pool[:1, :1])
    own, cross = (part.cpu().float() for part in parts)
    if isinstance(decoder.head, WideHead):
        decoder = replace(decoder, head=Linear(decoder.head.weight, None))
    plain: TorchDecoder = in_float32(decoder, "cpu")
    return steps(plain.over(TorchAttention(own, cross)), None, own, cross)


def fill(self_pool: Tensor, cross_pool: Tensor) -> int:
    """Fill the pools' first pages; returns the self pages that the longest prompt takes."""
    n_pages = -(-PROMPTS[-1] // self_pool.shape[3])
    for pool, n in ((self_pool, n_pages + 1), (cross_pool, 1)):
        pool[:n].zero_()
        pool[:n, 0] = noise(*pool[:n, 0].shape).to(pool.device).to(pool.dtype)
    return n_pages
