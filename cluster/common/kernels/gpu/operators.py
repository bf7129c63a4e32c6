"""GPU kernels of both roles: residual adds with a norm, and the scatter of KV into pages.

One kernel adds a product to the residual stream and computes the next norm. The scatter reads each
projected KV once and writes each page once, in the page's order, without asking the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.kernels import define, has_triton, launcher
from cluster.common.kernels.gpu.self_check import KERNELS, is_as_on_cpu, noise
from cluster.common.model.layers import LAYER_NORM_EPS, LayerNorm
from cluster.common.model.streams import upload

TRITON = "cluster.common.kernels.gpu.triton_kernels"
NO_PAGE = -1  # in a table of pages: this window is padding, write nothing


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    bias: Tensor | None,
    norm: LayerNorm,
    out: Tensor,
) -> None:
    """x += delta + bias, rounded once; then out = norm(x). Mutates x and out.

    Args:
        x: [n, d], contiguous like all others: the residual stream, of any float dtype.
        delta: [n, d], what is added; None adds nothing.
        bias: [d], added with it.
        out: [n, d], of any float dtype.
    """
    _add_norm(x, delta, bias, norm.weight, norm.bias, out)


@dataclass(frozen=True, slots=True)
class Pending:
    """What the residual stream still lacks: delta [n, d], and its bias [d]."""

    delta: Tensor | None = None
    bias: Tensor | None = None

    def add_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """Add it to x, and return the norm of the sum, [n, d] in the norm's dtype. Mutates x."""
        out = torch.empty_like(x, dtype=norm.dtype)
        add_norm(x, self.delta, self.bias, norm, out)
        return out


def _plain_add_norm(
    x: Tensor,
    delta: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    if delta is not None:
        added = delta.float() if bias is None else delta.float() + bias.float()
        x.copy_(x.float() + added)
    out.copy_(F.layer_norm(x.float(), weight.shape, weight.float(), shift.float(), LAYER_NORM_EPS))


_add_norm = define(
    "add_norm",
    writes=("x", "out"),
    cuda=launcher(TRITON, "launch_add_norm"),
    cpu=_plain_add_norm,
)


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


def page_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Upload the pages of windows that have equally many, without waiting for the copy."""
    flat = [page for own in pages for page in own]
    return upload(flat, torch.int32, device).view(len(pages), -1)


def stored_as(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `kv` to a pool's dtype. Beyond the range of float8_e4m3fn values become its largest
    number; a conversion alone makes NaN of them on some devices.
    """
    if dtype is torch.float8_e4m3fn:
        most = torch.finfo(dtype).max  # 448
        kv = kv.clamp(-most, most)  # keeps NaN
    return kv.to(dtype)


def scatters(pool: Tensor) -> bool:
    """Check that the scatter writes the same pages on the pool's device as on the CPU."""
    _, _, blocks, page_frames, *row = pool.shape  # one layer will do
    page = torch.zeros(4, 1, blocks, page_frames, *row).to(pool.dtype)
    kv = noise(1, page_frames + page_frames // 2, 1, blocks, *row)
    table = torch.tensor([[3, 1]], dtype=torch.int32)

    def scattered(kv: Tensor, pages: Tensor, table: Tensor) -> list[Tensor]:
        scatter_pages(kv, pages, table)
        return [pages]

    served = kv.to(torch.bfloat16 if pool.dtype.itemsize == 1 else pool.dtype)
    return is_as_on_cpu(KERNELS, scattered, pool.device, served, page, table)


def _launch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    (_kernel if has_triton() else _by_torch)(kv, pool, table)


def _by_torch(kv: Tensor, pool: Tensor, table: Tensor) -> None:
    page_frames = pool.shape[3]
    for window, pages in zip(kv, table.tolist(), strict=True):
        for page, frames in zip(pages, window.split(page_frames), strict=True):
            if page != NO_PAGE:
                # Rows of H * Dh are contiguous on both sides, which indexed writes would not use.
                part = frames.permute(1, 2, 0, 3, 4)  # [L, 2, page_frames, H, Dh]
                pool[page, :, :, : len(frames)] = stored_as(part, pool.dtype)


_kernel = launcher(TRITON, "launch_scatter")

_scatter_pages = define(
    "scatter_pages",
    writes=("pool",),
    cuda=_launch,
    cpu=_by_torch,
)
