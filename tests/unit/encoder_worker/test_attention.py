"""Attention in blocks gives what torch's gives, before and after its kernel is built."""

from __future__ import annotations

import pytest
import torch

from encoder_worker.attention import BlockAttention, make_attention, sdpa

BUILD_S = 100.0


@pytest.mark.parametrize("n", [1500, 130])
@pytest.mark.parametrize("loudness", [1.0, 12.0])
def test_blocks_give_what_sdpa_gives(n: int, loudness: float) -> None:
    """Within bfloat16's steps of values of about 1; `loudness` 12 gives scores of hundreds."""
    generator = torch.Generator().manual_seed(n)
    qkv = torch.randn(2, n, 3 * 128, generator=generator)
    qkv[..., : 2 * 128] *= loudness
    qkv[..., 128 : 2 * 128] += 5.0  # keys have an offset, which softmax does not see
    expected = sdpa(qkv, 2)
    attention = make_attention("cpu", torch.bfloat16)
    assert isinstance(attention, BlockAttention)
    before = attention(qkv.bfloat16(), 2)
    assert attention.wait(BUILD_S)
    after = attention(qkv.bfloat16(), 2)
    theirs = (sdpa(qkv.bfloat16(), 2).float() - expected).norm() / expected.norm()
    for got in (before, after):
        assert got.shape == expected.shape
        ours = (got.float() - expected).norm() / expected.norm()
        assert ours < max(0.01, 2.5 * theirs), f"{ours} off, torch's own bfloat16 is {theirs} off"


def test_other_dtypes_keep_torchs_attention() -> None:
    assert make_attention("cpu", torch.float32) is sdpa
    assert make_attention("cuda", torch.bfloat16) is sdpa
