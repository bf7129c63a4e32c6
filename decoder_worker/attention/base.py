"""The interface between the decoder and the implementations of its paged attention.

`plan` is called before each forward with the batch's shape. Indices are those of paged-attention
kernels, ragged over sequences. A layer's K or V is a strided view of its pool: `pool[:, layer, 0]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The pages that the queries of each entry attend to. All int32, on the CPU.

    qo_indptr [n + 1]: entry i owns the query rows qo_indptr[i] to qo_indptr[i + 1].
    kv_indptr [n + 1]: and the pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], in order.
    kv_last_page_len [n]: filled positions of its last page, 1 to the page's size.

    Example: 1500 frames in pages of 64 are 24 pages, the last of which holds 28: with a second
    entry of 70 frames, kv_indptr is [0, 24, 26] and kv_last_page_len [28, 6].

    Self-attention has one entry for each row. Cross-attention has one for each window, so that its
    beams or candidates read its pages once.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor

    @property
    def n_rows(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def most_queries(self) -> int:
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
    """The batch of one forward.

    self_kv: lengths count the new tokens; an entry's queries are its last positions, and attend
    causally. cross_kv: every query of an entry attends to all of its positions.
    """

    self_kv: PagedKV
    cross_kv: PagedKV

    @property
    def n_rows(self) -> int:
        return self.self_kv.n_rows


class MakeFixed(Protocol):
    """Makes backends for forwards of fixed sizes, which may be captured."""

    def __call__(self, n_rows: int, n_tokens: int, n_sharing: int = 1) -> ProjectedAttention:
        """For `n_rows` rows of `n_tokens` tokens; `n_sharing` neighbouring rows share a window."""


class AttentionBackend(Protocol):
    """Paged attention over the pools that the backend was made with."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one forward. Only this reads host data, so that the rest can be captured."""

    def begin(self, positions: Tensor) -> None:
        """Begin a forward of tokens at `positions`, int64 [n_tokens], on the device."""

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the new tokens into the self pool, then attend causally.

        q, k, v and result: [n_tokens, head, head_dim], the model's dtype, on the pools' device.
        """

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the window's cross-attention pages; q and result as in `self_attention`."""


class ProjectedAttention(AttentionBackend, Protocol):
    """A backend that also takes the fused projection of a self-attention."""

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        """Add the bias, write the new tokens' k and v into the self pool, then attend causally.

        qkv: [n_tokens, 3 * head * head_dim], contiguous, order q, k, v. bias: None if the product
        has it. Returns [n_tokens, head, head_dim] in the dtype of qkv.
        """
