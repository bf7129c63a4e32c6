"""Paged attention by flashinfer's kernels, over the page-major pools as they lie.

A layer's K and V are strided views of its pool, `pool[:, layer, 0]` and `[:, layer, 1]`: the
kernels take one set of strides for both. Three backends: `RaggedAttention` for any forward (beams,
long prompts, alignment); and for what a CUDA graph may hold, of a fixed number of rows,
`StepAttention` for decode steps and `PromptAttention` for prompts of one length.

Written from the source of flashinfer-python 0.7.2.post1; what it relies on there:

- A plan reads page counts alone (`DecodePlan`, scheduler.cuh), and cuts the KV at page borders; a
  run reads lengths from the device (`get_length`, page.cuh). So a plan holds while a row grows
  within its last page, and `kv_last_page_len` is set on the device, from the positions.
- With CUDA graphs the grid depends on the batch size only, and a plan's device pointers on nothing:
  a replayed graph follows a new plan.
- A plan writes to a pinned buffer of its wrapper, then copies from it in the stream: the copy must
  have been made before the next plan.
- `plan` itself waits for the device when the page indices come from the host; `fast_decode_plan`
  does not, and leaves it to the caller to bring them there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from cluster.model.streams import new_event
from decoder_worker.attention.append import Places, append_qkv, empty_queries
from decoder_worker.attention.base import AttentionBatch, PagedKV, ProjectedAttention
from decoder_worker.attention.operators import (
    Planned,
    append_to_pages,
    attend_pages,
    attend_pages_into,
)
from decoder_worker.attention.split_pages import SplitPages, parts_of

WORKSPACE_BYTES = 128 * 2**20  # what flashinfer recommends, for partial results of split KV
SPLIT_FRAMES = 125  # of a larger page: kernels share out a window by its pages
BACKEND = "fa2"  # not "auto": it takes any page size and fp8 pages under bf16 queries


class FlashInfer:
    """Makes backends over one pair of pools. They share a workspace, so a stream as well.

    self_pool, cross_pool: [page, layer, 2, page size, head, head_dim] on a GPU; the self pool's
        dtype is that of queries and results, the cross pool's may be float8_e4m3fn.
    """

    def __init__(self, self_pool: Tensor, cross_pool: Tensor) -> None:
        self._pools = self_pool, cross_pool
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self_pool.device)

    def ragged(self) -> ProjectedAttention:
        return RaggedAttention(*self._pools, self._workspace)

    def fixed(self, n_rows: int, n_tokens: int, n_sharing: int = 1) -> ProjectedAttention:
        """A backend for forwards of `n_rows` rows of `n_tokens` tokens; one token: decode steps.

        n_sharing: so many neighbouring rows, of a decode step, have one window together.
        """
        if n_tokens == 1:
            return StepAttention(*self._pools, self._workspace, n_rows, n_sharing)
        assert n_sharing == 1
        return PromptAttention(*self._pools, self._workspace, n_rows, n_tokens)


class RaggedAttention:
    """Implements `ProjectedAttention` with the prefill kernels: entries of any number of rows."""

    def __init__(self, self_pool: Tensor, cross_pool: Tensor, workspace: Tensor) -> None:
        dtype = self_pool.dtype
        self._self = _PrefillTable(self_pool, dtype, workspace, causal=True)
        parts = parts_of(cross_pool, SPLIT_FRAMES)
        self._cross = _PrefillTable(cross_pool, dtype, workspace, causal=False, parts=parts)
        self._entries = self._positions = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> None:
        self._self.plan(batch.self_kv)
        self._cross.plan(batch.cross_kv)
        entries, positions = _new_tokens(batch.self_kv, self._self.page_size)
        both = _on(torch.stack((entries, positions)), self._self.device)
        self._entries, self._positions = both.unbind(0)

    def begin(self, positions: Tensor) -> None:
        """Places came with the plan, which is made anew for every forward."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._self.append(layer, k, v, self._entries, self._positions)
        return self._self.run(layer, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        q = self._self.append_projected(layer, qkv, bias, self._entries, self._positions)
        return self._self.run(layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        return self._cross.run(layer, q)


class StepAttention:
    """Implements `ProjectedAttention` for decode steps: `n_rows` entries of one row each.

    `plan` does something only where pages have changed: a row came or went, or began a page.
    Rows that share a window are queries of one entry, so that its pages are read once.
    """

    def __init__(
        self,
        self_pool: Tensor,
        cross_pool: Tensor,
        workspace: Tensor,
        n_rows: int,
        n_sharing: int = 1,
    ) -> None:
        dtype = self_pool.dtype
        self._self = _StepTable(self_pool, dtype, workspace, n_rows)
        self._cross: _StepTable | _PrefillTable
        parts = parts_of(cross_pool, SPLIT_FRAMES)
        if n_sharing == 1:
            self._cross = _StepTable(cross_pool, dtype, workspace, n_rows, parts)
        else:
            n_windows = n_rows // n_sharing
            self._cross = _PrefillTable(
                cross_pool, dtype, workspace, causal=False, n_rows=n_windows, parts=parts
            )
        device = self_pool.device
        self._entries = torch.arange(n_rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(n_rows, dtype=torch.int32, device=device)
        # Positions before a row's last planned page, less one: what its position is counted from.
        self._before = torch.zeros(n_rows, dtype=torch.int32, device=device)

    def plan(self, batch: AttentionBatch) -> None:
        self_kv = batch.self_kv
        if self._self.plan(self_kv, _same_pages):
            before = (self_kv.kv_indptr.diff() - 1) * self._self.page_size - 1
            self._before.copy_(_on(before.int(), self._before.device), non_blocking=True)
        self._cross.plan(batch.cross_kv, _same)

    def begin(self, positions: Tensor) -> None:
        """Lengths follow positions: [page 0, page 1 of 64, position 70] has 7 in its last page."""
        self._positions.copy_(positions)
        torch.sub(self._positions, self._before, out=self._self.last_page_len)

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._self.append(layer, k, v, self._entries, self._positions)
        return self._self.run(layer, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        q = self._self.append_projected(layer, qkv, bias, self._entries, self._positions)
        return self._self.run(layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        return self._cross.run(layer, q)


class PromptAttention:
    """Implements `ProjectedAttention` for prompts: `n_rows` entries of `n_tokens` tokens each."""

    def __init__(
        self, self_pool: Tensor, cross_pool: Tensor, workspace: Tensor, n_rows: int, n_tokens: int
    ) -> None:
        dtype = self_pool.dtype
        self._self = _PrefillTable(self_pool, dtype, workspace, causal=True, n_rows=n_rows)
        self._cross = _PrefillTable(
            cross_pool,
            dtype,
            workspace,
            causal=False,
            n_rows=n_rows,
            parts=parts_of(cross_pool, SPLIT_FRAMES),
        )
        entries = torch.arange(n_rows, dtype=torch.int32).repeat_interleave(n_tokens)
        self._entries = entries.to(self_pool.device)
        positions = torch.arange(n_tokens, dtype=torch.int32).repeat(n_rows)
        self._positions = positions.to(self_pool.device)

    def plan(self, batch: AttentionBatch) -> None:
        self._self.plan(batch.self_kv)
        self._cross.plan(batch.cross_kv)

    def begin(self, positions: Tensor) -> None:
        """All begin at position 0."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._self.append(layer, k, v, self._entries, self._positions)
        return self._self.run(layer, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        q = self._self.append_projected(layer, qkv, bias, self._entries, self._positions)
        return self._self.run(layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        return self._cross.run(layer, q)


class _Table:
    """A page table on the device, over one pool."""

    def __init__(self, pool: Tensor, workspace: Tensor, parts: int) -> None:
        """parts: of each page, that kernels take for pages."""
        self.device = pool.device
        self._workspace = workspace
        n_head, head_dim = pool.shape[4:]
        self._split = SplitPages(pool, parts)
        self.page_size = self._split.page_size
        self._sizes = (n_head, n_head, head_dim, self.page_size)  # as every plan takes them
        self._pool = pool
        self._layers = self._split.layers
        self.indptr = self.indices = self.last_page_len = torch.empty(0)  # int32, set below
        # Recorded when the last plan's copy out of its pinned buffer was queued.
        self._planned = new_event()

    def _make_buffers(self, n_rows: int, n_pages: int) -> None:
        """A place for good, for up to `n_pages` of each row."""
        self.indptr = torch.zeros(n_rows + 1, dtype=torch.int32, device=self.device)
        self.indices = torch.zeros(n_rows * n_pages, dtype=torch.int32, device=self.device)
        self.last_page_len = torch.ones(n_rows, dtype=torch.int32, device=self.device)

    def append(self, layer: int, k: Tensor, v: Tensor, entries: Tensor, positions: Tensor) -> None:
        """Write keys and values of tokens at `positions` of `entries`, both int32 [n]."""
        pages = self._layers[layer]
        table = (self.indices, self.indptr, self.last_page_len)
        append_to_pages(k, v, entries, positions, *pages, *table)

    def _arguments(self, layer: int, q: Tensor) -> tuple[Tensor, ...]:
        """What a kernel of a layer's attention reads and writes, but for the result."""
        table = (self.indptr, self.indices, self.last_page_len)
        return (q, *self._layers[layer], *table, self._workspace)

    def append_projected(
        self, layer: int, qkv: Tensor, bias: Tensor | None, entries: Tensor, positions: Tensor
    ) -> Tensor:
        """The same of a fused projection whose bias is still to be added; returns its queries."""
        q = empty_queries(qkv, self._pool)
        places = Places(entries, positions, self.indptr, self.indices)
        append_qkv(qkv, bias, places, self._pool, layer, q)
        return q


class _PrefillTable(_Table):
    """n_rows: the number of entries, for a table that a graph holds; 0 takes any."""

    def __init__(
        self,
        pool: Tensor,
        dtype: torch.dtype,
        workspace: Tensor,
        *,
        causal: bool,
        n_rows: int = 0,
        parts: int = 1,
    ) -> None:
        super().__init__(pool, workspace, parts)
        buffers: dict[str, Tensor] = {}
        if n_rows:
            self._make_buffers(n_rows, self._split.n_pages)
            buffers = {
                "qo_indptr_buf": torch.zeros_like(self.indptr),
                "paged_kv_indptr_buf": self.indptr,
                "paged_kv_indices_buf": self.indices,
                "paged_kv_last_page_len_buf": self.last_page_len,
            }
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=n_rows > 0, backend=BACKEND, **buffers
        )
        self._planned_run = Planned(self._wrapper.run)
        self._is_fixed = n_rows > 0
        self._causal = causal
        self._dtypes = {"q_data_type": dtype, "kv_data_type": pool.dtype}
        self._kv: PagedKV | None = None

    def plan(self, kv: PagedKV, is_same: Callable[[PagedKV, PagedKV], bool] | None = None) -> bool:
        """Plan, and bring the table to the device; False when the last one will do."""
        kv = self._split.table(kv)
        if self._kv is not None and is_same is not None and is_same(self._kv, kv):
            return False
        self._planned.synchronize()
        indices = _on(kv.kv_indices, self.device)  # from the host, a plan would wait for the device
        if not self._is_fixed:
            self.indices, self.indptr = indices, _on(kv.kv_indptr, self.device)
            self.last_page_len = _on(kv.kv_last_page_len, self.device)
        self._wrapper.plan(
            kv.qo_indptr.pin_memory(),
            kv.kv_indptr.pin_memory(),
            indices,
            kv.kv_last_page_len.pin_memory(),
            *self._sizes,
            causal=self._causal,
            **self._dtypes,
        )
        self._planned.record()
        self._kv = kv
        return True

    def run(self, layer: int, q: Tensor) -> Tensor:
        # Given, since one of the wrapper's own is filled with zeros by one more kernel.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend_pages_into(*self._arguments(layer, q), out, self._planned_run.number)
        return out


class _StepTable(_Table):
    def __init__(
        self, pool: Tensor, dtype: torch.dtype, workspace: Tensor, n_rows: int, parts: int = 1
    ) -> None:
        super().__init__(pool, workspace, parts)
        self._make_buffers(n_rows, self._split.n_pages)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_len,
            backend=BACKEND,
        )
        self._planned_run = Planned(self._wrapper.run)
        self._dtypes = {"q_data_type": dtype, "kv_data_type": pool.dtype}
        self._kv: PagedKV | None = None

    def plan(self, kv: PagedKV, is_same: Callable[[PagedKV, PagedKV], bool]) -> bool:
        """Plan, and bring the table to the device; False when the last one will do."""
        kv = self._split.table(kv)
        if self._kv is not None and is_same(self._kv, kv):
            return False
        self._planned.synchronize()
        if self._kv is None:  # loads the kernels, which the fast way needs
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
        self._planned.record()
        self._kv = kv
        return True

    def run(self, layer: int, q: Tensor) -> Tensor:
        out: Tensor = attend_pages(*self._arguments(layer, q), self._planned_run.number)
        return out


def _same_pages(a: PagedKV, b: PagedKV) -> bool:
    return torch.equal(a.kv_indptr, b.kv_indptr) and torch.equal(a.kv_indices, b.kv_indices)


def _same(a: PagedKV, b: PagedKV) -> bool:
    return a is b or (_same_pages(a, b) and torch.equal(a.kv_last_page_len, b.kv_last_page_len))


def _new_tokens(kv: PagedKV, page_size: int) -> tuple[Tensor, Tensor]:
    """Entry and position of each query's token, int32 [n_tokens] on the CPU: the entry's last.

    Example: two queries of an entry of 70 positions stand at 68 and 69.
    """
    counts = kv.qo_indptr.diff()
    lengths = (kv.kv_indptr.diff() - 1) * page_size + kv.kv_last_page_len
    entries = torch.arange(len(counts)).repeat_interleave(counts)
    to_end = kv.qo_indptr[1:][entries] - torch.arange(len(entries))  # 1 for the last query
    return entries.int(), (lengths[entries] - to_end).int()


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made in the stream's order without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True)
