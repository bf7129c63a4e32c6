"""Paged attention by flashinfer's kernels over page-major pools.

`RaggedAttention` computes any forward. `StepAttention`, for decode steps, and `PromptAttention`,
for prompts of one length, have a fixed number of rows, so that a CUDA graph can hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_worker.attention.base import AttentionBatch, PagedKV, ProjectedAttention
from decoder_worker.attention.flashinfer_tables import (
    PinnedPlans,
    PrefillTable,
    StepTable,
    Table,
    on_device,
    same,
    same_pages,
)

WORKSPACE_BYTES = 128 * 2**20  # what flashinfer recommends, for partial results of split KV


class FlashInfer:
    """Makes backends over one pair of pools. They share a workspace, so a stream as well.

    self_pool, cross_pool: [page, layer, 2, page size, head, head_dim] on a GPU. Queries and results
        have the self pool's dtype; the cross pool's may be float8_e4m3fn.
    """

    def __init__(self, self_pool: Tensor, cross_pool: Tensor) -> None:
        self._pools = self_pool, cross_pool
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self_pool.device)
        self._common = (self_pool.dtype, workspace, PinnedPlans())

    def _prefill_tables(self, *sizes: int) -> tuple[PrefillTable, PrefillTable]:
        own, cross = self._pools
        return (
            PrefillTable(own, *self._common, *sizes, is_own=True),
            PrefillTable(cross, *self._common, *sizes),
        )

    def ragged(self) -> ProjectedAttention:
        return RaggedAttention(*self._prefill_tables())

    def fixed(self, n_rows: int, n_tokens: int, n_sharing: int = 1) -> ProjectedAttention:
        """Implements `MakeFixed`."""
        if n_tokens > 1:
            assert n_sharing == 1
            return PromptAttention(*self._prefill_tables(n_rows, n_tokens), n_rows, n_tokens)
        own, cross = self._pools
        steps = StepTable(own, *self._common, n_rows)
        if n_sharing == 1:
            return StepAttention(steps, StepTable(cross, *self._common, n_rows), n_rows)
        windows = PrefillTable(cross, *self._common, n_rows // n_sharing, n_sharing)
        return StepAttention(steps, windows, n_rows)


class _OverTables:
    """The base of the backends. _entries, _positions: int32 [n_tokens], of the new tokens."""

    def __init__(self, own: Table, cross: Table, entries: Tensor, positions: Tensor) -> None:
        self._self, self._cross = own, cross
        self._entries, self._positions = (x.to(own.device) for x in (entries, positions))

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._self.append(layer, k, v, self._entries, self._positions)
        return self._self.run(layer, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        q = self._self.append_projected(layer, qkv, bias, self._entries, self._positions)
        return self._self.run(layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        return self._cross.run(layer, q)


class RaggedAttention(_OverTables):
    """Implements `ProjectedAttention` with the prefill kernels: entries of any number of rows."""

    def __init__(self, own: Table, cross: Table) -> None:
        super().__init__(own, cross, torch.empty(0), torch.empty(0))

    def plan(self, batch: AttentionBatch) -> None:
        self._self.plan(batch.self_kv)
        self._cross.plan(batch.cross_kv)
        entries, positions = _new_tokens(batch.self_kv, self._self.page_size)
        both = on_device(torch.stack((entries, positions)), self._self.device)
        self._entries, self._positions = both.unbind(0)

    def begin(self, positions: Tensor) -> None:
        """Nothing to do: every forward is planned anew, with its positions."""


class StepAttention(_OverTables):
    """Implements `ProjectedAttention` for decode steps: `n_rows` entries of one row each.

    `plan` does something only if pages changed: a row came or went, or began a page. Rows that
    share a window are queries of one entry, so that its pages are read once.
    """

    def __init__(self, own: StepTable, cross: Table, n_rows: int) -> None:
        rows = torch.arange(n_rows, dtype=torch.int32, device=own.device)
        super().__init__(own, cross, rows, torch.zeros_like(rows))
        self._before = own.before  # subtracted from a row's position

    def plan(self, batch: AttentionBatch) -> None:
        self._self.plan(batch.self_kv, same_pages)
        self._cross.plan(batch.cross_kv, same)

    def begin(self, positions: Tensor) -> None:
        """Derive lengths from positions: at position 70, in pages of 64, the last page holds 7."""
        self._positions.copy_(positions)
        torch.sub(self._positions, self._before, out=self._self.last_page_len)


class PromptAttention(_OverTables):
    """Implements `ProjectedAttention` for prompts: `n_rows` entries of `n_tokens` tokens each."""

    def __init__(self, own: Table, cross: Table, n_rows: int, n_tokens: int) -> None:
        entries = torch.arange(n_rows, dtype=torch.int32).repeat_interleave(n_tokens)
        positions = torch.arange(n_tokens, dtype=torch.int32).repeat(n_rows)
        super().__init__(own, cross, entries, positions)

    def plan(self, batch: AttentionBatch) -> None:
        self._self.plan(batch.self_kv, same)
        self._cross.plan(batch.cross_kv, same)

    def begin(self, positions: Tensor) -> None:
        """Nothing to do: all prompts begin at position 0."""


def _new_tokens(kv: PagedKV, page_size: int) -> tuple[Tensor, Tensor]:
    """Entry and position of each query's token, int32 [n_tokens] on the CPU."""
    counts = kv.qo_indptr.diff()
    lengths = (kv.kv_indptr.diff() - 1) * page_size + kv.kv_last_page_len
    entries = torch.arange(len(counts)).repeat_interleave(counts)
    to_end = kv.qo_indptr[1:][entries] - torch.arange(len(entries))  # 1 for the last query
    return entries.int(), (lengths[entries] - to_end).int()
