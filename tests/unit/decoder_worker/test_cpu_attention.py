"""The compiled attention of a CPU gives what the reference backend gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from cluster.common.kernels.cpu.arithmetic import number
from cluster.common.kernels.cpu.machine_code import as_array
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import choose_attention
from decoder_worker.cpu.arrays import Pages
from decoder_worker.cpu.attention_kernels import append, attend_pieces, cut, join
from decoder_worker.cpu.fused import cut_pages
from decoder_worker.cpu.step_team import new_counters

N_HEAD, HEAD_DIM, N_LAYER = 2, 64, 2
FLOAT8 = torch.float8_e4m3fn


def make_pools(dtype: torch.dtype, cross: torch.dtype, cross_page: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def pool(n_pages: int, page_size: int, kind: torch.dtype) -> Tensor:
        shape = (n_pages, N_LAYER, 2, page_size, N_HEAD, HEAD_DIM)
        return torch.randn(shape, generator=generator).to(kind)

    return pool(16, 8, dtype), pool(16, cross_page, cross)


class CompiledAttention:
    """The attention of a layer's phases, on one thread."""

    def __init__(self, self_pool: Tensor, cross_pool: Tensor) -> None:
        self._pools = (as_array(self_pool), as_array(cross_pool))

    def plan(self, batch: AttentionBatch) -> None:
        own, cross = self._pools
        self._own = cut_pages(cut, batch.self_kv, own, causal=True)
        self._cross = cut_pages(cut, batch.cross_kv, cross, causal=False)

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = torch.stack((q, k, v), 1).flatten(1).float()
        append(qkv.numpy(), self._own.pool, self._own.last, layer)
        return self._attend(self._own, layer, qkv, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        return self._attend(self._cross, layer, q.flatten(1).float().contiguous(), q)

    def _attend(self, pages: Pages, layer: int, query: Tensor, like: Tensor) -> Tensor:
        shape = (len(query), int(pages.n_pieces.max()), N_HEAD)
        results = tuple(np.empty(one, np.float32) for one in (shape, shape, (*shape, HEAD_DIM)))
        n, attended = len(pages.pieces), torch.empty(len(query), N_HEAD * HEAD_DIM)
        assert attend_pieces(query.numpy(), pages, layer, results, new_counters(), 0, n)
        join(pages.n_pieces, results, attended.numpy())
        return attended.to(like.dtype).view(like.shape)


def run(
    backend: TorchAttention | CompiledAttention, batch: AttentionBatch, dtype: torch.dtype
) -> list[Tensor]:
    n = int(batch.self_kv.qo_indptr[-1])
    generator = torch.Generator().manual_seed(n)
    found = []
    backend.plan(batch)
    for layer in range(N_LAYER):
        qkv = torch.randn(n, 3, N_HEAD, HEAD_DIM, generator=generator).to(dtype)
        q, k, v = qkv.unbind(1)
        found.append(backend.self_attention(layer, q, k, v))
        found.append(backend.cross_attention(layer, q.contiguous()))
    return found


def steps(cross_page: int) -> AttentionBatch:
    """Three steps of ragged lengths, then three beams of one window."""
    lengths = [1, 9, 16, 4, 5, 6]
    own = [[2 * row, 2 * row + 1] for row in range(6)]
    n_pages = -(-100 // cross_page)
    windows = [[(3 * window + i) % 16 for i in range(n_pages)] for window in range(4)]
    return AttentionBatch(
        self_kv=PagedKV.make([1] * 6, own, lengths, 8),
        cross_kv=PagedKV.make([1, 1, 1, 3], windows, [100, 70, 1, 100], cross_page),
    )


def prompts() -> AttentionBatch:
    return AttentionBatch(
        self_kv=PagedKV.make([5, 3], [[0, 1], [2, 3]], [5, 12], 8),
        cross_kv=PagedKV.make([5, 3], [[0], [1]], [100, 100], 100),
    )


@pytest.mark.parametrize(
    ("dtype", "cross", "most"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 0.02),
        (torch.float32, torch.bfloat16, 0.02),
        (torch.float32, FLOAT8, 1e-5),
        (torch.bfloat16, FLOAT8, 0.02),
    ],
)
@pytest.mark.parametrize("cross_page", [100, 32])
def test_kernels_give_what_the_reference_gives(
    dtype: torch.dtype, cross: torch.dtype, most: float, cross_page: int
) -> None:
    own, shared = make_pools(dtype, cross, cross_page)
    theirs_pool = own.clone()
    ours = CompiledAttention(own, shared)
    theirs = TorchAttention(theirs_pool, shared)
    batches = [steps(cross_page)] + ([prompts()] if cross_page == 100 else [])
    for batch in batches:
        found, expected = run(ours, batch, dtype), run(theirs, batch, dtype)
        for got, reference in zip(found, expected, strict=True):
            assert got.dtype == dtype
            largest = (got.float() - reference.float()).abs().max().item()
            assert largest <= most, f"differs by {largest}"
    assert torch.equal(own, theirs_pool), "the new keys and values lie elsewhere"


@pytest.mark.parametrize("n_positions", [1, 7, 8, 9, 17, 127, 128, 129])
def test_every_number_of_8_bits_is_read_as_torch_reads_it(n_positions: int) -> None:
    """Keys and values hold all finite numbers of the format, of both signs, subnormal ones too."""
    own, _ = make_pools(torch.float32, FLOAT8, 1)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 < 127].repeat(130)  # without its NaN
    generator = torch.Generator().manual_seed(n_positions)
    shape = (1, N_LAYER, 2, n_positions, N_HEAD, HEAD_DIM)
    order = torch.randperm(len(codes), generator=generator)
    shared = codes[order].repeat(4)[: torch.Size(shape).numel()].view(FLOAT8).view(shape).clone()
    shared[:, :, 0] = (shared[:, :, 0].float() / 64).to(FLOAT8)  # scores that do not all saturate
    batch = AttentionBatch(
        self_kv=PagedKV.make([1], [[0]], [1], 8),
        cross_kv=PagedKV.make([1], [[0]], [n_positions], n_positions),
    )
    ours = CompiledAttention(own.clone(), shared)
    found = run(ours, batch, torch.float32)
    expected = run(TorchAttention(own.clone(), shared.float()), batch, torch.float32)
    for got, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=2e-3)  # of up to 448


def test_numbers_of_8_bits_are_exact_without_vectors() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 < 127]
    assert _numbers(codes.numpy()).tolist() == codes.view(FLOAT8).float().tolist()


@njit
def _numbers(stored: Any) -> Any:
    found = np.empty(len(stored), np.float32)
    for i in range(len(stored)):
        found[i] = number(stored[i])
    return found


def test_what_the_kernels_do_not_know_stays_with_the_reference() -> None:
    own, shared = make_pools(torch.float32, torch.float32, 100)
    in_float16 = own, shared.to(torch.float16)
    narrow = own[..., :32].contiguous(), shared[..., :32].contiguous()
    for pools in (in_float16, narrow):
        assert choose_attention("auto", *pools).team is None
    assert choose_attention("torch", own, shared).team is None
    assert choose_attention("auto", own, shared).team is not None
