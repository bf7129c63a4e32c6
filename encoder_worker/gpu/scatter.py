"""Projected KV into the pages of a table, without asking the host, so that a graph can hold it.

On a GPU one Triton kernel reads each product once and writes each page once, in the page's order;
torch's indexed writes read the permuted product element by element. On a CPU, and as the kernel's
reference, the same in torch.
"""

from __future__ import annotations

from torch import Tensor

from cluster.model.cross_kv import stored_as
from cluster.model.operators import define, nothing

NO_PAGE = -1  # in a table of pages: this window is padding, write nothing


def scatter_pages(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    """Write each window's KV into its pages. Mutates `pool`.

    Example: 1500 frames in pages of 64 take 24 pages; the last gets 28 frames, and its other 36
    are left as they were.

    Args:
        kv: [B, T, L, 2, H, Dh], contiguous.
        pool: [n_pages, L, 2, page_frames, H, Dh] on the same device, any float dtype; an 8-bit
            one saturates.
        table: int32 [B, pages of a window], in frame order; NO_PAGE is left out.
    """
    _scatter_pages(kv, pool, table)


def _launch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    from encoder_worker.gpu.scatter_kernel import launch

    launch(kv, pool, table)


def _by_torch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    page_frames = pool.shape[3]
    for window, pages in zip(kv, table.tolist(), strict=True):
        for page, frames in zip(pages, window.split(page_frames), strict=True):
            if page != NO_PAGE:
                pool[page, :, :, : len(frames)] = stored_as(
                    frames.permute(1, 2, 0, 3, 4), pool.dtype
                )


_scatter_pages = define(
    "scatter_pages(Tensor kv, Tensor(a!) pool, Tensor table) -> ()",
    cuda=_launch,
    cpu=_by_torch,
    shapes=nothing,
)
