"""The CPU's attention: compiled kernels for decode steps, the reference backend for all else.

A batch in which no entry has more than a few queries (steps, and beams over one window) goes
through `attention_kernels`, once they are built; prompts and odd shapes through `TorchAttention`.
Entries are computed one by one in both, so a sequence's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.jit.background import InBackground, as_array
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.sources import KERNEL_SOURCES

if TYPE_CHECKING:
    from decoder_worker.cpu.attention_kernels import Kernels

FEW_QUERIES = 8  # of one entry: above it torch's product over queries is faster
HEAD_DIM = 64  # what the kernels are compiled for
ALONE_BYTES = 1 << 19  # a core reads so much in less time than it takes to wake another twice
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Plan:
    """`PagedKV` as arrays, with room for the scores."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any
    scores: Any
    alone: bool  # on one thread

    @classmethod
    def of(cls, kv: PagedKV, pool: Any) -> _Plan | None:
        """None when an entry has more than a few queries."""
        page_size, n_head, head_dim = pool.shape[3:]
        position_bytes = 2 * n_head * head_dim * pool.itemsize
        qo_indptr, kv_indptr = kv.qo_indptr.numpy(), kv.kv_indptr.numpy()
        if int(np.diff(qo_indptr).max()) > FEW_QUERIES:
            return None
        longest = int(np.diff(kv_indptr).max()) * page_size
        n_units = len(kv.kv_last_page_len) * n_head
        scores = np.empty((n_units, longest), dtype=np.float32)
        last = kv.kv_last_page_len.numpy()
        n_positions = (len(kv.kv_indices) - len(last)) * page_size + int(last.sum())
        alone = n_positions * position_bytes <= ALONE_BYTES
        return cls(qo_indptr, kv_indptr, kv.kv_indices.numpy(), last, scores, alone)


class CpuAttention:
    """Implements `AttentionBackend` over CPU pools; arguments as `TorchAttention`'s."""

    def __init__(self, self_pool: Tensor, cross_pool: Tensor) -> None:
        self._reference = TorchAttention(self_pool, cross_pool)
        self._kernels = InBackground(
            "decoder", _builder(self_pool.dtype, cross_pool.dtype), KERNEL_SOURCES
        )
        self._self_pool, self._cross_pool = as_array(self_pool), as_array(cross_pool)
        self._batch: AttentionBatch | None = None
        self._is_planned = False
        self._running: Kernels | None = None  # chosen anew by each plan, for the whole forward
        self._self_plan: _Plan | None = None
        self._cross_plan: _Plan | None = None

    def wait(self, timeout_s: float) -> bool:
        """Whether the kernels are there, after at most `timeout_s`."""
        return self._kernels.wait(timeout_s) is not None

    @property
    def batch(self) -> AttentionBatch:
        """That was planned last."""
        assert self._batch is not None
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._is_planned = batch, False

    def _plan_batch(self) -> None:
        """In the first layer: a forward may go without."""
        batch, self._is_planned = self.batch, True
        self._running, self._self_plan, self._cross_plan = self._kernels.get(), None, None
        if self._running is not None:
            one_each = len(batch.self_kv.kv_last_page_len) == int(batch.self_kv.qo_indptr[-1])
            if one_each:
                self._self_plan = _Plan.of(batch.self_kv, self._self_pool)
            self._cross_plan = _Plan.of(batch.cross_kv, self._cross_pool)
        if self._self_plan is None or self._cross_plan is None:
            self._reference.plan(batch)

    def begin(self, positions: Tensor) -> None:
        """Lengths and places came with the plan."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._is_planned:
            self._plan_batch()
        plan, kernels = self._self_plan, self._running
        if plan is None or kernels is None:
            return self._reference.self_attention(layer, q, k, v)
        pool, pages = self._self_pool, (plan.kv_indptr, plan.kv_indices, plan.last_page_len)
        kernels.append(as_array(k), as_array(v), pool, layer, *pages)
        return self._attend(plan, pool, layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        if not self._is_planned:
            self._plan_batch()
        if self._cross_plan is None:
            return self._reference.cross_attention(layer, q)
        return self._attend(self._cross_plan, self._cross_pool, layer, q)

    def _attend(self, plan: _Plan, pool: Any, layer: int, q: Tensor) -> Tensor:
        assert self._running is not None
        attend = self._running.attend_alone if plan.alone else self._running.attend
        out = torch.empty(q.shape, dtype=q.dtype)
        indices = (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.last_page_len)
        attend(as_array(q), pool, layer, *indices, plan.scores, as_array(out))
        return out


def fits_kernels(self_pool: Tensor, cross_pool: Tensor) -> bool:
    """Whether there are kernels for these pools."""
    pools = (self_pool, cross_pool)
    on_cpu = all(pool.device.type == "cpu" for pool in pools)
    return on_cpu and all(p.dtype in DTYPES and p.shape[-1] == HEAD_DIM for p in pools)


def _builder(own: torch.dtype, cross: torch.dtype) -> Callable[[], Kernels]:
    stored = {torch.bfloat16: np.uint16, torch.float32: np.float32}

    def build_kernels() -> Kernels:
        from decoder_worker.cpu.attention_kernels import build

        return build(stored[own], stored[cross])

    return build_kernels
