"""Triton kernels of `operators`. Imported only with Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cluster.common.model.layers import LAYER_NORM_EPS

BLOCK = 2048  # elements of a program: 4 KB in bfloat16, 16 bytes a thread with 4 warps, twice


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    x,  # [n, width], read and, with a delta, written
    delta,  # [n, width]
    bias,  # [width]
    weight,
    shift,
    out,  # [n, width]
    width: tl.constexpr,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,  # a power of two, at least the width
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    place = row * width + column
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        added = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (values + added).to(x.dtype.element_ty)
        tl.store(x + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / width
    centred = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / width
    factor = 1.0 / tl.sqrt(variance + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * factor * gain + offset
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


def launch_add_norm(*given: Any) -> None:
    """Take the arguments of the operator `add_norm`, in order."""
    x, delta, bias, _, _, out = given
    n, width = x.shape
    for tensor in (x, out) if delta is None else (x, out, delta):
        assert tensor.is_contiguous()
        assert tensor.shape == x.shape
    add_norm[(n,)](
        *given,
        width,
        delta is not None,
        bias is not None,
        LAYER_NORM_EPS,
        triton.next_power_of_2(width),
    )


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


def launch_scatter(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    """Launch `scatter_pages`.

    One program writes a run of one page's [page_frames, H * Dh] block of one layer's K or V, which
    is contiguous in the pool; it reads rows of H * Dh elements, one per frame.
    """
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
