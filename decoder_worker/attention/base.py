"""The seam between the decoder and the way its attention is computed.

A backend holds the two page pools, self and cross. `plan` is called once before each forward and
takes everything that depends on the batch's shape; the layers then hand over queries (and, for
self-attention, the new keys and values) and get mixed values back. The indices are those that
paged-attention kernels take, ragged over sequences. A layer's K or V is a strided view of a
page-major pool: `pool[:, layer, 0]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Which pages the queries of each entry attend to. All int32, on the CPU.

    qo_indptr [n + 1]: entry i owns the query rows qo_indptr[i] to qo_indptr[i + 1].
    kv_indptr [n + 1]: and the pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], in order.
    kv_last_page_len [n]: of its last page so many positions are filled, 1 to the page's size.

    Example: 1500 frames in pages of 64 are 24 pages, the last of which holds 28: with a second
    entry of 70 frames, kv_indptr is [0, 24, 26] and kv_last_page_len [28, 6].

    Self-attention has one entry for each row of history; cross-attention one for each window, so
    that several query rows (beams, candidates) of a window read its pages once.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor

    @property
    def n_rows(self) -> int:
        """Query rows of all entries."""
        return int(self.qo_indptr[-1])

    @property
    def most_queries(self) -> int:
        """Query rows of the entry that has most of them."""
        return int(self.qo_indptr.diff().max())

    @classmethod
    def make(
        cls,
        n_queries: Sequence[int],
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        page_size: int,
    ) -> PagedKV:
        """Flatten per-entry lists; pages beyond an entry's length are left out."""
        qo_indptr, kv_indptr = [0], [0]
        kv_indices: list[int] = []
        last: list[int] = []
        for n, own, length in zip(n_queries, pages, lengths, strict=True):
            n_pages = -(-length // page_size)
            assert 0 < n_pages <= len(own)
            qo_indptr.append(qo_indptr[-1] + n)
            kv_indptr.append(kv_indptr[-1] + n_pages)
            kv_indices.extend(own[:n_pages])
            last.append(length - (n_pages - 1) * page_size)
        columns = (qo_indptr, kv_indptr, kv_indices, last)
        return cls(*(torch.tensor(column, dtype=torch.int32) for column in columns))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One forward's batch.

    self_kv: lengths count the new tokens, whose keys and values the forward writes: the queries
        of an entry are its last positions, and each sees itself and what is before it.
    cross_kv: every query of an entry sees all of its positions.
    """

    self_kv: PagedKV
    cross_kv: PagedKV

    @property
    def n_rows(self) -> int:
        return self.self_kv.n_rows


class MakeFixed(Protocol):
    """Makes what computes forwards of fixed sizes, which may be captured."""

    def __call__(self, n_rows: int, n_tokens: int, n_sharing: int = 1) -> ProjectedAttention:
        """Of `n_rows` rows of `n_tokens` tokens each; one token: decode steps.

        n_sharing: so many neighbouring rows, of a decode step, have one window together.
        """


class AttentionBackend(Protocol):
    """Paged attention over the pools that the backend was made with."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one forward. Only this reads what is on the host: a graph has the rest."""

    def begin(self, positions: Tensor) -> None:
        """The forward begins with tokens at `positions` (int64 [n_tokens], on the device)."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the new tokens into the self pool, then attend causally.

        q, k, v and result: [n_tokens, head, head_dim], the model's dtype, on the pools' device.
        """

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the window's cross-attention pages; q and result as in `self_attention`."""


class ProjectedAttention(AttentionBackend, Protocol):
    """A backend that takes a self-attention's projection as the product leaves it."""

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """Add the bias, write the new tokens' k and v into the self pool, then attend causally.

        qkv: [n_tokens, 3 * head * head_dim], contiguous, order q, k, v. bias: of as many, or None
        where the product has it already. [n_tokens, head, head_dim], in the dtype of qkv.
        """
