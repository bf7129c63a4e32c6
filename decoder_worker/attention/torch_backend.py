"""Paged attention by torch's SDPA: the CPU's backend, and the reference for every other.

Entries are computed one by one, so that a sequence's result has the same bits in any batch. An
entry of one page, the default on a CPU, is read as a view; one of several is gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kv.cross_kv import packed_page
from decoder_worker.attention.base import AttentionBatch, PagedKV


@dataclass(frozen=True, slots=True)
class _Entry:
    """Query rows [begin, end) and their pages. mask: bool [end - begin, length]; None: all True."""

    begin: int
    end: int
    pages: list[int]
    length: int
    mask: Tensor | None


class TorchAttention:
    """Implements `ProjectedAttention`.

    self_pool: [page, layer, 2, page_tokens, head, head_dim], written by `self_attention`.
    cross_pool: [page, layer, 2, page_frames, head, head_dim], only read. Queries are converted to
        its dtype and results back; from a pool of 8 bits, KV is converted instead.
    packed: a window lies packed in its cross page (`common.kv.cross_kv.packed_page`), laid out for
        the length of its entry, which has one page.
    """

    def __init__(self, self_pool: Tensor, cross_pool: Tensor, *, packed: bool = False) -> None:
        self._self_pool = self_pool
        self._cross_pool = cross_pool
        self._packed = packed
        self._self_entries: list[_Entry] = []
        self._cross_entries: list[_Entry] = []
        self._write_pages = torch.empty(0, dtype=torch.int64)
        self._write_offsets = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        device = self._self_pool.device
        page_tokens = self._self_pool.shape[3]
        self._self_entries = _entries(batch.self_kv, page_tokens, causal=True, device=device)
        self._cross_entries = _entries(
            batch.cross_kv, self._cross_pool.shape[3], causal=False, device=device
        )
        pages, offsets = [], []
        for entry in self._self_entries:
            for position in range(entry.length - (entry.end - entry.begin), entry.length):
                pages.append(entry.pages[position // page_tokens])
                offsets.append(position % page_tokens)
        self._write_pages = torch.tensor(pages, dtype=torch.int64, device=device)
        self._write_offsets = torch.tensor(offsets, dtype=torch.int64, device=device)

    def begin(self, positions: Tensor) -> None:
        """Nothing to do: the plan has lengths and places."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._self_pool[:, layer]  # [page, 2, page_tokens, head, head_dim]
        where = (self._write_pages, self._write_offsets)
        kv[:, 0].index_put_(where, k)
        kv[:, 1].index_put_(where, v)
        return _attend([_read(kv, entry) for entry in self._self_entries], self._self_entries, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        n_head, head_dim = self._self_pool.shape[4:]
        summed = qkv if bias is None else qkv + bias
        q, k, v = summed.view(len(qkv), 3, n_head, head_dim).unbind(1)
        return self.self_attention(layer, q, k, v)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        pool, entries = self._cross_pool, self._cross_entries
        if self._packed:
            kvs = [packed_page(pool[entry.pages[0]], entry.length)[layer] for entry in entries]
        else:
            kvs = [_read(pool[:, layer], entry) for entry in entries]
        if pool.dtype.itemsize == 1:
            return _attend(kvs, entries, q)
        return _attend(kvs, entries, q.to(pool.dtype)).to(q.dtype)


def _entries(kv: PagedKV, page_size: int, causal: bool, device: torch.device) -> list[_Entry]:
    rows, bounds = kv.qo_indptr.tolist(), kv.kv_indptr.tolist()
    indices, last = kv.kv_indices.tolist(), kv.kv_last_page_len.tolist()
    entries = []
    for i in range(len(last)):
        pages = indices[bounds[i] : bounds[i + 1]]
        length = (len(pages) - 1) * page_size + last[i]
        n_queries = rows[i + 1] - rows[i]
        mask = None
        if causal and n_queries > 1:
            everything = torch.ones(n_queries, length, dtype=torch.bool, device=device)
            mask = everything.tril_(length - n_queries)  # the last query sees all positions
        entries.append(_Entry(rows[i], rows[i + 1], pages, length, mask))
    return entries


def _read(kv: Tensor, entry: _Entry) -> Tensor:
    """kv [page, 2, page size, head, head_dim] -> [2, length, head, head_dim]."""
    if len(entry.pages) == 1:
        return kv[entry.pages[0], :, : entry.length]  # a view
    return kv[entry.pages].transpose(0, 1).flatten(1, 2)[:, : entry.length]


def _attend(kvs: Sequence[Tensor], entries: Sequence[_Entry], q: Tensor) -> Tensor:
    """kvs: [2, length, head, head_dim] of each entry."""
    out = torch.empty_like(q)
    for kv, entry in zip(kvs, entries, strict=True):
        own = kv.to(q.dtype)  # a view still, unless the pool's dtype is another
        # SDPA takes [1, head, length, head_dim]
        mixed = F.scaled_dot_product_attention(
            q[entry.begin : entry.end].transpose(0, 1).unsqueeze(0),
            own[0].transpose(0, 1).unsqueeze(0),
            own[1].transpose(0, 1).unsqueeze(0),
            attn_mask=entry.mask,
        )
        out[entry.begin : entry.end] = mixed.squeeze(0).transpose(0, 1)
    return out
