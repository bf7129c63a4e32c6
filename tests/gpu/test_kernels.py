"""Each kernel of ours on a GPU equals its plain twin on the CPU, in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cluster.common.kernels.gpu.operators import add_norm
from cluster.common.model.layers import LayerNorm
from decoder_worker.attention.operators import append_qkv
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler, gumbel, noise_key, random_bits
from tests.support.workers.slot_states import N, filled_slots, make_tokenizer

pytestmark = pytest.mark.gpu

SHARE = 0.02  # of the range: two roundings to bfloat16
WIDTHS = (384, 1280)


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def assert_near(on_gpu: Tensor, expected: Tensor) -> None:
    largest = (on_gpu.cpu().float() - expected.float()).abs().max().item()
    assert largest <= SHARE * expected.float().abs().max().item(), f"differs by {largest}"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_norm(width: int, stream: torch.dtype) -> None:
    x, delta, bias = rand(9, width).to(stream), rand(9, width, seed=1), rand(width, seed=2)
    found = []
    for device in ("cpu", "cuda"):
        norm = LayerNorm(rand(width, seed=3).to(device), rand(width, seed=4).to(device), x.dtype)
        own, out = x.to(device, copy=True), torch.empty(9, width, dtype=delta.dtype, device=device)
        add_norm(own, delta.to(device), bias.to(device), norm, out)
        found.append((own, out))
    for expected, on_gpu in zip(*found, strict=True):
        assert_near(on_gpu, expected)


@pytest.mark.parametrize("heads", [6, 20])
def test_the_append(heads: int) -> None:
    width = 64 * heads
    numbers = ([0, 0, 0, 1, 1], [7, 8, 9, 0, 5], [0, 3, 5], [6, 2, 9, 1, 4])
    found = []
    for device in ("cpu", "cuda"):
        table = [torch.tensor(column, dtype=torch.int32, device=device) for column in numbers]
        pool = torch.zeros(11, 2, 2, 4, heads, 64, dtype=torch.bfloat16, device=device)
        q = torch.empty(5, heads, 64, dtype=torch.bfloat16, device=device)
        qkv, bias = rand(5, 3 * width).to(device), rand(3 * width, seed=1).to(device)
        append_qkv(qkv, bias, *table, pool, 1, q)
        found.append((pool, q))
    for expected, on_gpu in zip(*found, strict=True):
        assert torch.equal(on_gpu.cpu(), expected)


def test_the_choice_of_tokens() -> None:
    tokenizer = make_tokenizer()
    found = []
    for device in ("cpu", "cuda"):
        rules = LogitRules(tokenizer, 50, device)
        slots = filled_slots(tokenizer, 0, device)
        logits = torch.randn(N, tokenizer.n_vocab, generator=torch.Generator().manual_seed(1))
        index = torch.arange(N, device=device)
        reference = TorchSampler(rules, slots)
        sampler = reference if device == "cpu" else GpuSampler(reference, rules, slots)
        sampled = sampler(logits.to(device), slots.rows(index), None)
        found.append((sampled.tokens, slots.table, sampled.logprobs))
    (tokens, table, logprobs), on_gpu = found
    assert torch.equal(on_gpu[0].cpu(), tokens)
    assert torch.equal(on_gpu[1].cpu(), table)
    torch.testing.assert_close(on_gpu[2].cpu(), logprobs, rtol=1e-4, atol=2e-5)


def test_a_gpu_makes_the_same_bits() -> None:
    """Sampling noise is the CPU's, so that a seed gives the same text on either."""
    pairs = [(noise_key(seed, 0, 0, 0), step) for seed in range(4) for step in range(4)]
    keys, steps = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    there = random_bits(keys.cuda(), steps.cuda(), 51_866).cpu()
    assert torch.equal(there, random_bits(keys, steps, 51_866))
    noise = gumbel(keys.cuda(), steps.cuda(), 51_866).cpu()
    torch.testing.assert_close(noise, gumbel(keys, steps, 51_866), atol=1e-5, rtol=1e-5)
