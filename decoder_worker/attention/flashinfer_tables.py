"""Page tables of flashinfer's kernels on the device, with their plans and runs.

Relies on what the source of flashinfer-python 0.7.2.post1 does:

- A plan reads only page counts (`DecodePlan`, scheduler.cuh) and cuts the KV at page borders; a run
  reads lengths from the device (`get_length`, page.cuh). So a plan holds while a row grows within
  its last page, and `kv_last_page_len` is set on the device, from the positions.
- With CUDA graphs the grid depends only on the batch size, and device pointers do not depend on a
  plan: a replayed graph follows a new plan.
- A plan writes to its wrapper's pinned buffer, then copies from it in the stream: the copy must be
  complete before another plan writes there.
- `plan` waits for the device if the page indices come from the host; `fast_decode_plan` does not,
  and expects the caller to bring them there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from cluster.common.model.streams import new_event
from decoder_worker.attention.base import PagedKV
from decoder_worker.attention.operators import (
    Planned,
    append_qkv,
    append_to_pages,
    attend_pages,
    empty_queries,
)

N_PINNED = 8  # plans whose copies may be pending, 8 MB each; a launch has two or four
BACKEND = "fa2"  # not "auto": it takes any page size and fp8 pages under bf16 queries


class PinnedPlans:
    """A few pinned buffers for plans, used in turns by all tables.

    With only one buffer, a plan would wait for the step before, because the last plan's copy is
    queued behind it.
    """

    def __init__(self) -> None:
        # Each with the event recorded behind the copy out of it.
        self._turns: deque[tuple[Tensor, Any]] = deque()

    def take_from(self, wrapper: Any) -> None:
        if len(self._turns) < N_PINNED:
            self._turns.append((wrapper._pin_memory_int_workspace_buffer, new_event()))
        wrapper._pin_memory_int_workspace_buffer = None

    def plan(self, wrapper: Any, plan: Callable[[], None]) -> None:
        """Call a wrapper's `plan` with a buffer whose last copy is complete."""
        self._turns.rotate()
        buffer, copied = self._turns[0]
        copied.synchronize()
        wrapper._pin_memory_int_workspace_buffer = buffer
        plan()
        copied.record()


class Table:
    """A page table on the device, for one pool."""

    _planned_run: Planned
    _wrapper: Any

    def __init__(
        self, pool: Tensor, dtype: torch.dtype, workspace: Tensor, plans: PinnedPlans
    ) -> None:
        """dtype: of queries."""
        self.device = pool.device
        self._plans = plans
        self._workspace = workspace
        n_head, head_dim = pool.shape[4:]
        self.page_size = pool.shape[3]
        self._sizes = (n_head, n_head, head_dim, self.page_size)  # as every plan takes them
        self._dtypes = {"q_data_type": dtype, "kv_data_type": pool.dtype}
        self._pool = pool
        self._layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(pool.shape[1])]
        self.indptr = self.indices = self.last_page_len = torch.empty(0)  # int32, set below
        self._kv: PagedKV | None = None  # planned last

    def _make_buffers(self, n_rows: int, n_pages: int) -> None:
        self.indptr = torch.zeros(n_rows + 1, dtype=torch.int32, device=self.device)
        self.indices = torch.zeros(n_rows * n_pages, dtype=torch.int32, device=self.device)
        self.last_page_len = torch.ones(n_rows, dtype=torch.int32, device=self.device)

    def plan(self, kv: PagedKV, is_same: Callable[[PagedKV, PagedKV], bool] | None = None) -> None:
        """Plan, and copy the table to the device, unless the last plan is the same."""
        if self._kv is not None and is_same is not None and is_same(self._kv, kv):
            return
        is_first, self._kv = self._kv is None, None  # a plan that raises leaves none
        self._plans.plan(self._wrapper, partial(self._plan, kv, is_first=is_first))
        self._kv = kv

    def _planned(self, wrapper: Any) -> Planned:
        self._plans.take_from(wrapper)
        return Planned(wrapper.run)

    def _plan(self, kv: PagedKV, *, is_first: bool) -> None:
        """is_first: this table has no valid plan."""
        raise NotImplementedError

    def append(self, layer: int, k: Tensor, v: Tensor, entries: Tensor, positions: Tensor) -> None:
        """Write keys and values of tokens at `positions` of `entries`, both int32 [n]."""
        pages = self._layers[layer]
        table = (self.indices, self.indptr, self.last_page_len)
        append_to_pages(k, v, entries, positions, *pages, *table)

    def run(self, layer: int, q: Tensor) -> Tensor:
        # Without it a prefill wrapper would make one, and zero it by one more kernel.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        table = (self.indptr, self.indices, self.last_page_len)
        number = self._planned_run.number
        attend_pages(q, *self._layers[layer], *table, self._workspace, out, number)
        return out

    def append_projected(
        self, layer: int, qkv: Tensor, bias: Tensor | None, entries: Tensor, positions: Tensor
    ) -> Tensor:
        """Append from a fused projection whose bias is still to be added; returns its queries."""
        q = empty_queries(qkv, self._pool)
        places = (entries, positions, self.indptr, self.indices)
        append_qkv(qkv, bias, *places, self._pool, layer, q)
        return q


class PrefillTable(Table):
    """n_rows: the number of entries of a table that a graph holds; 0 takes any number.

    n_queries: of each entry of such a table; without it the kernel takes tiles of 64 or more.
    """

    def __init__(
        self,
        pool: Tensor,
        dtype: torch.dtype,
        workspace: Tensor,
        plans: PinnedPlans,
        n_rows: int = 0,
        n_queries: int = 0,
        *,
        is_own: bool = False,
    ) -> None:
        super().__init__(pool, dtype, workspace, plans)
        buffers: dict[str, Tensor] = {}
        if n_rows:
            self._make_buffers(n_rows, len(self._pool))
            buffers = {
                "qo_indptr_buf": torch.zeros_like(self.indptr),
                "paged_kv_indptr_buf": self.indptr,
                "paged_kv_indices_buf": self.indices,
                "paged_kv_last_page_len_buf": self.last_page_len,
            }
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=n_rows > 0, backend=BACKEND, **buffers
        )
        self._planned_run = self._planned(self._wrapper)
        self._is_fixed = n_rows > 0
        self._options = {"causal": is_own, "uniform_q_len": n_queries, **self._dtypes}

    def _plan(self, kv: PagedKV, *, is_first: bool) -> None:
        # From the host, a plan would wait for the device.
        indices = on_device(kv.kv_indices, self.device)
        if not self._is_fixed:
            self.indices, self.indptr = indices, on_device(kv.kv_indptr, self.device)
            self.last_page_len = on_device(kv.kv_last_page_len, self.device)
        self._wrapper.plan(
            kv.qo_indptr.pin_memory(),
            kv.kv_indptr.pin_memory(),
            indices,
            kv.kv_last_page_len.pin_memory(),
            *self._sizes,
            **self._options,
        )


class StepTable(Table):
    """before: positions before a row's last planned page, less one; int32 [n_rows], in place."""

    def __init__(
        self,
        pool: Tensor,
        dtype: torch.dtype,
        workspace: Tensor,
        plans: PinnedPlans,
        n_rows: int,
    ) -> None:
        super().__init__(pool, dtype, workspace, plans)
        self._make_buffers(n_rows, len(self._pool))
        self.before = torch.zeros_like(self.last_page_len)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_len,
            backend=BACKEND,
        )
        self._planned_run = self._planned(self._wrapper)

    def _plan(self, kv: PagedKV, *, is_first: bool) -> None:
        before = (kv.kv_indptr.diff() - 1) * self.page_size - 1
        self.before.copy_(on_device(before.int(), self.device), non_blocking=True)
        if is_first:  # loads the kernels for `fast_decode_plan`
            self._wrapper.plan(
                kv.kv_indptr, kv.kv_indices, kv.kv_last_page_len, *self._sizes, **self._dtypes
            )
        else:
            self.indptr.copy_(kv.kv_indptr.pin_memory(), non_blocking=True)
            pinned = kv.kv_indices.pin_memory()
            self.indices[: len(pinned)].copy_(pinned, non_blocking=True)
            self.last_page_len.copy_(kv.kv_last_page_len.pin_memory(), non_blocking=True)
            fast_decode_plan(
                self._wrapper,
                self.indptr,
                self.indices[: len(pinned)],
                self.last_page_len,
                *self._sizes,
                **self._dtypes,
                global_override_indptr_cpu=kv.kv_indptr,
            )


def same_pages(a: PagedKV, b: PagedKV) -> bool:
    return torch.equal(a.kv_indptr, b.kv_indptr) and torch.equal(a.kv_indices, b.kv_indices)


def same(a: PagedKV, b: PagedKV) -> bool:
    return a is b or (same_pages(a, b) and torch.equal(a.kv_last_page_len, b.kv_last_page_len))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)
