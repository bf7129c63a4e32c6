"""The scatter of projected KV into pages as one Triton kernel. Imported only where Triton is.

One program writes a run of one page's [page_frames, H * Dh] block of one layer's K or V, which is
contiguous in the pool; what it reads are rows of H * Dh elements, one per frame. Where there is no
GPU its tests run it interpreted (TRITON_INTERPRET=1), and compile it for one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program: 4 KB in bfloat16, 16 bytes a thread with 4 warps, twice


@triton.jit  # type: ignore[untyped-decorator]
def scatter(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    kv,  # [B, T, n_blocks, width]
    pool,  # [n_pages, n_blocks, page_frames, width]
    table,  # int32 [B, pages_per_window]
    n_frames,
    pages_per_window,
    n_blocks: tl.constexpr,  # layers times two
    page_frames: tl.constexpr,
    width: tl.constexpr,  # heads times their size
    most: tl.constexpr,  # largest number of the pool's dtype, or 0 where it has an infinity
    block: tl.constexpr,
):
    run, which, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page = tl.load(table + place).to(tl.int64)
    if page >= 0:
        window, first = place // pages_per_window, (place % pages_per_window) * page_frames
        element = run * block + tl.arange(0, block)  # of [page_frames, width]
        frame = first + element // width
        inside = (element < page_frames * width) & (frame < n_frames)
        row = (window.to(tl.int64) * n_frames + frame) * n_blocks + which
        values = tl.load(kv + row * width + element % width, mask=inside)
        if most > 0:  # comparisons keep NaN, which a minimum may lose
            values = values.to(tl.float32)
            values = tl.where(values > most, most, tl.where(values < -most, -most, values))
        start = (page * n_blocks + which) * page_frames * width
        tl.store(pool + start + element, values.to(pool.dtype.element_ty), mask=inside)


def launch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    """See `cluster.common.kernels.gpu.scatter.scatter_pages`."""
    n_windows, n_frames, n_layer, two, n_head, head_dim = kv.shape
    page_frames, width = pool.shape[3], n_head * head_dim
    assert kv.is_contiguous()
    assert pool.is_contiguous()
    grid = (triton.cdiv(page_frames * width, BLOCK), n_layer * two, table.numel())
    scatter[grid](
        kv,
        pool,
        table,
        n_frames,
        table.shape[1],
        n_layer * two,
        page_frames,
        width,
        torch.finfo(pool.dtype).max if pool.dtype is torch.float8_e4m3fn else 0.0,
        BLOCK,
    )
    assert n_windows == table.shape[0]
