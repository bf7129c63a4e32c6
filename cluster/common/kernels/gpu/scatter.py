"""Projected KV into the pages of a table, without asking the host, so that a graph can hold it.

On a GPU one Triton kernel reads each product once and writes each page once, in the page's order;
torch's indexed writes read the permuted product element by element. On a CPU, where Triton does not
load, and as the kernel's reference, the same in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import define, has_triton, launcher
from cluster.common.model.streams import upload

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
    _operator(kv, pool, table)


def page_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The table of windows that have as many pages each; to a GPU without waiting for it."""
    flat = [page for own in pages for page in own]
    return upload(flat, torch.int32, device).view(len(pages), -1)


def stored_as(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """`kv` in a pool's dtype.

    float8_e4m3fn has no infinity: what is beyond its range becomes the largest number it has, for
    a conversion alone makes NaN of it on some devices.
    """
    if dtype is torch.float8_e4m3fn:
        most = torch.finfo(dtype).max  # 448
        kv = kv.clamp(-most, most)  # keeps NaN
    return kv.to(dtype)


def _launch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    (_kernel if has_triton() else _by_torch)(kv, pool, table)


def _by_torch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    page_frames = pool.shape[3]
    for window, pages in zip(kv, table.tolist(), strict=True):
        for page, frames in zip(pages, window.split(page_frames), strict=True):
            if page != NO_PAGE:
                # Rows of H * Dh are contiguous on both sides: indexed writes make no use of it.
                part = frames.permute(1, 2, 0, 3, 4)  # [L, 2, page_frames, H, Dh]
                pool[page, :, :, : len(frames)] = stored_as(part, pool.dtype)


_kernel = launcher("cluster.common.kernels.gpu.scatter_kernel")

_operator = define(
    "scatter_pages",
    writes=("pool",),
    cuda=_launch,
    cpu=_by_torch,
)
