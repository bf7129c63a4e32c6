"""Sampling noise on a GPU is the CPU's, so that a seed gives the same text on either."""

from __future__ import annotations

import pytest
import torch

from decoder_worker.sampling.sampler import gumbel, noise_key, random_bits

pytestmark = pytest.mark.gpu

N_VOCAB = 51_866


def test_a_gpu_makes_the_same_bits() -> None:
    pairs = [(noise_key(seed, 0, 0, 0), step) for seed in range(4) for step in range(4)]
    keys, steps = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    there = random_bits(keys.cuda(), steps.cuda(), N_VOCAB).cpu()
    assert torch.equal(there, random_bits(keys, steps, N_VOCAB))
    noise = gumbel(keys.cuda(), steps.cuda(), N_VOCAB).cpu()
    torch.testing.assert_close(noise, gumbel(keys, steps, N_VOCAB), atol=1e-5, rtol=1e-5)
