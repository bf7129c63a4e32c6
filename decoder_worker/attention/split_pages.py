"""Whole-window pages as attention kernels see them: smaller ones, by a view and other indices.

Kernels share out a window's frames among the device by its pages, so a page per window would leave
most of a GPU idle in a small batch. A layer's K in such a page is one contiguous run of frames; its
parts are pages too, as far apart as a part is long. Nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_worker.attention.base import PagedKV


class SplitPages:
    """A pool's pages in `parts` parts each; with one part the pool as it is."""

    def __init__(self, pool: Tensor, parts: int) -> None:
        """pool: [page, layer, 2, page size, head, head_dim], contiguous; parts divide the size."""
        n_pages, n_layer, _, page_size, n_head, head_dim = pool.shape
        self._parts = parts
        self.page_size = page_size // parts
        self.n_pages = n_pages * parts
        self._known: tuple[PagedKV, PagedKV] | None = None
        if parts == 1:
            self.layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(n_layer)]
            return
        self._stride = 2 * n_layer * parts  # parts from a page to the next
        flat = pool.view(-1, self.page_size, n_head, head_dim)
        n = len(flat) - self._stride + parts  # up to the last part of any layer's K or V
        begins = [parts * block for block in range(2 * n_layer)]
        blocks = [flat[begin : begin + n] for begin in begins]
        self.layers = list(zip(blocks[::2], blocks[1::2], strict=True))

    def table(self, kv: PagedKV) -> PagedKV:
        """The same entries over the parts; the same object for the same object.

        Example: a window of 1500 frames in page 3 of a pool of 2 layers, in 12 parts of 125, has
        the parts 144 to 155, since a page has 48 of them.
        """
        if self._parts == 1:
            return kv
        if self._known is None or self._known[0] is not kv:
            self._known = (kv, self._of_parts(kv))
        return self._known[1]

    def _of_parts(self, kv: PagedKV) -> PagedKV:
        whole = self.page_size * self._parts
        lengths = (kv.kv_indptr.diff() - 1) * whole + kv.kv_last_page_len
        counts = (lengths + self.page_size - 1) // self.page_size
        indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        entries = torch.arange(len(counts)).repeat_interleave(counts)
        place = torch.arange(int(indptr[-1])) - indptr[entries]  # among the entry's parts
        pages = kv.kv_indices[kv.kv_indptr[entries] + place // self._parts]
        return PagedKV(
            qo_indptr=kv.qo_indptr,
            kv_indptr=indptr,
            kv_indices=(pages * self._stride + place % self._parts).int(),
            kv_last_page_len=(lengths - (counts - 1) * self.page_size).int(),
        )


def parts_of(pool: Tensor, frames: int) -> int:
    """Into how many parts of `frames` a pool's pages can be split; 1 where they cannot."""
    page_frames = pool.shape[3]
    return page_frames // frames if page_frames % frames == 0 else 1
