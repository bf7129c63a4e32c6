"""Sampling noise: the same bits everywhere, and of the right distribution."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_worker.sampling.sampler import gumbel, noise_key, random_bits

N_VOCAB = 51_866
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def plain_bits(key: int, step: int, token: int) -> int:
    """The definition, on Python's integers."""
    x = ((key & MASK64) + (step + 1) * 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    x ^= x >> 31

    def mix(y: int) -> int:
        y = ((y ^ (y >> 16)) * 0x7FEB352D) & MASK32
        y = ((y ^ (y >> 15)) * 0x846CA68B) & MASK32
        return y ^ (y >> 16)

    return mix((mix((token * 0x9E3779B9 + x) & MASK32) + (x >> 32)) & MASK32)


def tensors(*pairs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, steps = zip(*pairs, strict=True)
    return torch.tensor(keys, dtype=torch.int64), torch.tensor(steps, dtype=torch.int64)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64),
    window=st.integers(0, 10_000),
    step=st.integers(0, 447),
    token=st.integers(0, 999),
)
def test_bits_follow_their_definition(seed: int, window: int, step: int, token: int) -> None:
    key = noise_key(seed, window, 0, 0)
    bits = random_bits(*tensors((key, step)), 1000)[0, token].item()
    assert bits & MASK32 == plain_bits(key, step, token)


def test_every_part_of_the_key_counts() -> None:
    places = [(s, w, a, c) for s in range(4) for w in range(4) for a in range(4) for c in range(4)]
    keys = [noise_key(*place) for place in places]
    assert len(set(keys)) == len(places)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_noise_is_gumbel() -> None:
    pairs = [(noise_key(5, 0, 0, 0), step) for step in range(20)]
    noise = gumbel(*tensors(*pairs), N_VOCAB).double()
    assert noise.isfinite().all()
    error = 6 / math.sqrt(noise.numel())
    assert abs(noise.mean().item() - 0.57722) < 1.3 * error
    assert abs(noise.var().item() - math.pi**2 / 6) < 3 * error
    for x in (-1.0, 0.0, 1.0, 3.0, 6.0):
        share = (noise < x).double().mean().item()
        assert abs(share - math.exp(-math.exp(-x))) < error, x
