"""The CPU's attention: compiled kernels for decode steps, the reference backend for all else.

A batch in which no entry has more than a few queries (steps, and beams over one window) goes
through `cpu_kernels`, once they are built; prompts and odd shapes through `TorchAttention`.
Entries are computed one by one in both, so a sequence's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.model.jit import InBackground, as_array
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention

if TYPE_CHECKING:
    from decoder_worker.attention.cpu_kernels import Kernels

FEW_QUERIES = 8  # of one entry: above it torch's product over queries is faster
HEAD_DIM = 64  # what the kernels are compiled for
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Plan:
    """`PagedKV` as arrays, with room for the scores."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any
    scores: Any

    @classmethod
    def of(cls, kv: PagedKV, page_size: int, n_head: int) -> _Plan | None:
        """None when an entry has more than a few queries."""
        qo_indptr, kv_indptr = kv.qo_indptr.numpy(), kv.kv_indptr.numpy()
        if int(np.diff(qo_indptr).max()) > FEW_QUERIES:
            return None
        longest = int(np.diff(kv_indptr).max()) * page_size
        n_units = len(kv.kv_last_page_len) * n_head
        scores = np.empty((n_units, longest), dtype=np.float32)
        last = kv.kv_last_page_len.numpy()
        return cls(qo_indptr, kv_indptr, kv.kv_indices.numpy(), last, scores)


class CpuAttention:
    """Implements `AttentionBackend` over CPU pools; arguments as `TorchAttention`'s."""

    def __init__(self, self_pool: Tensor, cross_pool: Tensor) -> None:
        self._reference = TorchAttention(self_pool, cross_pool)
        self._kernels = InBackground("decoder", _builder(self_pool.dtype))
        self._self_pool, self._cross_pool = as_array(self_pool), as_array(cross_pool)
        self._n_head = self_pool.shape[4]
        self._running: Kernels | None = None  # chosen anew by each plan, for the whole forward
        self._self_plan: _Plan | None = None
        self._cross_plan: _Plan | None = None

    def wait(self, timeout_s: float) -> bool:
        """Whether the kernels are there, after at most `timeout_s`."""
        return self._kernels.wait(timeout_s) is not None

    def plan(self, batch: AttentionBatch) -> None:
        self._running, self._self_plan, self._cross_plan = self._kernels.get(), None, None
        if self._running is not None:
            one_each = len(batch.self_kv.kv_last_page_len) == int(batch.self_kv.qo_indptr[-1])
            if one_each:
                self._self_plan = self._plan(batch.self_kv, self._self_pool)
            self._cross_plan = self._plan(batch.cross_kv, self._cross_pool)
        if self._self_plan is None or self._cross_plan is None:
            self._reference.plan(batch)

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan, kernels = self._self_plan, self._running
        if plan is None or kernels is None:
            return self._reference.self_attention(layer, q, k, v)
        pool, pages = self._self_pool, (plan.kv_indptr, plan.kv_indices, plan.last_page_len)
        kernels.append(as_array(k), as_array(v), pool, layer, *pages)
        return self._attend(plan, pool, layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        if self._cross_plan is None:
            return self._reference.cross_attention(layer, q)
        return self._attend(self._cross_plan, self._cross_pool, layer, q)

    def _plan(self, kv: PagedKV, pool: Any) -> _Plan | None:
        return _Plan.of(kv, pool.shape[3], self._n_head)

    def _attend(self, plan: _Plan, pool: Any, layer: int, q: Tensor) -> Tensor:
        assert self._running is not None
        out = torch.empty(q.shape, dtype=q.dtype)
        indices = (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.last_page_len)
        self._running.attend(
            as_array(q), pool, layer, *indices, plan.scores, as_array(out)
        )
        return out


def make_attention(self_pool: Tensor, cross_pool: Tensor) -> AttentionBackend:
    """The backend for pools on this device."""
    compiles = self_pool.dtype == cross_pool.dtype and self_pool.dtype in DTYPES
    if self_pool.device.type == "cpu" and compiles and self_pool.shape[-1] == HEAD_DIM:
        return CpuAttention(self_pool, cross_pool)
    return TorchAttention(self_pool, cross_pool)


def _builder(dtype: torch.dtype) -> Callable[[], Kernels]:
    def build_kernels() -> Kernels:
        from decoder_worker.attention.cpu_kernels import build

        return build(np.uint16 if dtype == torch.bfloat16 else np.float32)

    return build_kernels
