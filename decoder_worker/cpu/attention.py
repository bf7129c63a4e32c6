"""The CPU's attention: compiled kernels for few queries, the reference backend for many.

A batch in which no entry has more than a few queries (decode steps, beams over one window, short
prompts) goes through `attention_kernels`, once they are built; long prompts and alignments go
through `TorchAttention`. In both a sequence's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.background import as_array
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.compiled import attention_kernels
from decoder_worker.cpu.fused_arrays import HEAD_DIM, PIECE, Pages
from decoder_worker.cpu.step_team import StepTeam

if TYPE_CHECKING:
    from decoder_worker.cpu.attention_kernels import AttentionKernels

FEW_QUERIES = 8  # of one entry: above it torch's product over queries is faster
ALONE_BYTES = 1 << 19  # a core reads so much in less time than it takes to wake another twice
DTYPES = (torch.float32, torch.bfloat16)
CROSS_DTYPES = (*DTYPES, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One pool's part of a forward.

    results: what the kernels leave for each piece. alone: one thread is to do it.
    """

    pages: Pages
    results: tuple[Any, Any, Any]
    alone: bool


class CpuAttention:
    """Implements `AttentionBackend` over CPU pools; arguments as in `TorchAttention`."""

    def __init__(
        self, self_pool: Tensor, cross_pool: Tensor, team: StepTeam, *, packed: bool = False
    ) -> None:
        self._reference = TorchAttention(self_pool, cross_pool, packed=packed)
        self._packed = packed
        self._self_pool, self._cross_pool = as_array(self_pool), as_array(cross_pool)
        self._team = team
        dtypes = (self._self_pool.dtype.type, self._cross_pool.dtype.type)
        self._kernels = attention_kernels(*dtypes)
        self._running: AttentionKernels | None = None  # None: the reference computes this forward
        self._self_plan: _Plan | None = None
        self._cross_plan: _Plan | None = None

    def plan(self, batch: AttentionBatch) -> None:
        few = max(batch.self_kv.most_queries, batch.cross_kv.most_queries) <= FEW_QUERIES
        self._running = self._kernels.get() if few else None
        if self._running is None:
            self._reference.plan(batch)
            return
        cut = self._running.cut
        self._self_plan = _plan(cut, batch.self_kv, self._self_pool, causal=True)
        self._cross_plan = _plan(
            cut, batch.cross_kv, self._cross_pool, causal=False, packed=self._packed
        )

    def begin(self, positions: Tensor) -> None:
        """Lengths and places came with the plan."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._running is None:
            return self._reference.self_attention(layer, q, k, v)
        plan = self._self_plan
        assert plan is not None
        qkv = as_array(torch.stack((q, k, v), 1).flatten(1).float())
        self._running.append(qkv, plan.pages.pool, plan.pages.last, layer)
        return self._attend(self._running, plan, layer, qkv, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        if self._running is None:
            return self._reference.cross_attention(layer, q)
        assert self._cross_plan is not None
        query = as_array(q.flatten(1).float().contiguous())
        return self._attend(self._running, self._cross_plan, layer, query, q)

    def _attend(
        self, kernels: AttentionKernels, plan: _Plan, layer: int, query: Any, like: Tensor
    ) -> Tensor:
        attended = torch.empty(len(query), like[0].numel())
        job = partial(kernels.attend, query, plan.pages, layer, plan.results, as_array(attended))
        run = self._team.run_alone if plan.alone else self._team.run
        run(job, len(plan.pages.pieces) + 1)
        return attended.to(like.dtype).view(like.shape)


def fits_kernels(self_pool: Tensor, cross_pool: Tensor) -> bool:
    """Whether there are kernels for these pools."""
    pools = (self_pool, cross_pool)
    on_cpu = all(pool.device.type == "cpu" for pool in pools)
    have_dtypes = self_pool.dtype in DTYPES and cross_pool.dtype in CROSS_DTYPES
    return on_cpu and have_dtypes and all(pool.shape[-1] == HEAD_DIM for pool in pools)


def cut_pages(
    cut: Callable[..., int], kv: PagedKV, pool: Any, *, causal: bool, packed: bool = False
) -> Pages:
    """What the rows of a `PagedKV` attend to in a pool; `cut` is the kernel."""
    page_size, n_rows = pool.shape[3], kv.n_rows
    most = -(-page_size // PIECE) * len(kv.kv_indices) * (n_rows if causal else 1)
    pieces = np.empty((most, 7), np.int32)
    n_pieces, last = np.empty(n_rows, np.int32), np.empty((n_rows, 2), np.int32)
    indices = (kv.qo_indptr, kv.kv_indptr, kv.kv_indices, kv.kv_last_page_len)
    arrays = (index.numpy() for index in indices)
    n = cut(*arrays, page_size, causal, packed, pieces, n_pieces, last)
    return Pages(pool, pieces[:n], n_pieces, last)


def _plan(
    cut: Callable[..., int], kv: PagedKV, pool: Any, *, causal: bool, packed: bool = False
) -> _Plan:
    pages, n_head = cut_pages(cut, kv, pool, causal=causal, packed=packed), pool.shape[4]
    shape = (kv.n_rows, int(pages.n_pieces.max()), n_head)
    results = (np.empty(shape, np.float32), np.empty(shape, np.float32))
    n_positions = int((pages.pieces[:, 4] - pages.pieces[:, 3]).sum())
    alone = n_positions * 2 * n_head * HEAD_DIM * pool.itemsize <= ALONE_BYTES
    return _Plan(pages, (*results, np.empty((*shape, HEAD_DIM), np.float32)), alone)
