"""Cross-attention K and V of every decoder layer, from encoder states into pages.

With a page per window (CPU) each product is copied to its place, and a shorter window is packed at
the page's beginning, so that one READ moves it. With smaller pages one product for all layers is
scattered. Runs in the encoder worker, or in the decoder's where states travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from cluster.common.kernels.gpu.operators import page_table, scatter_pages, stored_as
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import cross_kv_shapes
from cluster.common.model.kv_scales import KVScales
from cluster.common.model.layers import (
    MIDDLE,
    DynamicInt8,
    Linear,
    Projection,
    packer,
    quantize_rows,
)
from cluster.common.model.weights import load_tensors

WINDOWS_AT_ONCE = 4  # on a GPU: rows enough for a fast product, whose result is 983 MB for large-v3


class CrossKVProjection:
    """The products of all layers, K then V of each."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scales: KVScales | None = None,
        *,
        int8: bool = False,  # hold the weights in 8 bits (CPU)
    ) -> None:
        dims = checkpoint.dims
        self._n_audio_ctx = dims.n_audio_ctx
        self._shape = (dims.n_text_layer, 2, dims.n_text_head, dims.text_head_dim)
        parts = cross_kv_parts(checkpoint, dtype, device, scales)
        pack = packer(device, dtype, int8=int8)
        on_cpu = torch.device(device).type == "cpu"
        # Fused on a GPU, weight [L * 2 * d, n_audio_state]; separate on a CPU, since results lie
        # apart in a page.
        self._products = [pack(p) for p in (parts if on_cpu else [Linear.fused(parts)])]

    def project(self, states: Tensor) -> Tensor:
        """states [B, T, n_audio_state] -> [B, T, L, 2, H, Dh]."""
        results = [one(states) for one in self._products]
        joined = results[0] if len(results) == 1 else torch.cat(results, -1)
        return joined.view(*states.shape[:2], *self._shape)

    def write(self, states: Tensor, pool: Tensor, pages: Sequence[Sequence[int]]) -> None:
        """Project states into the pages of each window.

        Args:
            states: [B, T, n_audio_state]; T may be less than the checkpoint's positions.
            pool: [n_pages, L, 2, page_frames, H, Dh] of any float dtype (8 bits saturate); mutated.
            pages: per window its pages in frame order, as many as T frames take.
        """
        if is_packed(pool, self._n_audio_ctx):
            for row, own in zip(states, pages, strict=True):  # a window at a time fits the cache
                self.write_rows(packed_page(pool[own[0]], len(row)), row, 0)
            return
        table = page_table(pages, pool.device)
        at_once = 1 if states.device.type == "cpu" else WINDOWS_AT_ONCE
        for first in range(0, len(states), at_once):
            part = slice(first, first + at_once)
            scatter_pages(self.project(states[part]), pool, table[part])

    def write_rows(self, page: Tensor, states: Tensor, begin: int) -> None:
        """Project states [n, n_audio_state], frames from `begin` on, to page [L, 2, T, H, Dh]."""
        blocks = page.flatten(0, 1).flatten(2)[:, begin : begin + len(states)]  # [L * 2, n, d]
        for block, rows in zip(blocks, products_of(states, self._products), strict=True):
            block.copy_(stored_as(rows, block.dtype))


def products_of(x: Tensor, products: Sequence[Projection]) -> Iterator[Tensor]:
    """Apply each product to x [n, n_in], which is quantised once for weights of 8 bits."""
    if not isinstance(products[0], DynamicInt8):
        yield from (one(x) for one in products)
        return
    signed, scale = quantize_rows(x)
    rows = signed.view(torch.uint8) ^ MIDDLE
    for one in products:
        assert isinstance(one, DynamicInt8)
        out = one.unscaled(rows, x.dtype).mul_(scale.to(x.dtype)[:, None])
        yield out if one.bias is None else out.add_(one.bias)


def cross_kv_parts(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    scales: KVScales | None = None,
) -> list[Linear]:
    """The products, K then V of each layer; `scales` are for pools of 8 bits."""
    dims, parts = checkpoint.dims, []
    tensors = load_tensors(checkpoint, cross_kv_shapes(dims), dtype, device)
    for layer, name in product(range(dims.n_text_layer), ("k_proj", "v_proj")):
        part = Linear.load(tensors, f"decoder.layers.{layer}.encoder_attn.{name}")
        parts.append(part if scales is None else scales.shrink(layer, name, part))
    return parts


class Unprojected:
    """Replaces `CrossKVProjection` where states travel; takes pools of `as_kv_pool`."""

    def project(self, states: Tensor) -> Tensor:
        """states [B, T, n_audio_state] -> [B, T, 1, 1, 1, n_audio_state], a view."""
        return states[:, :, None, None, None]

    def write(self, states: Tensor, pool: Tensor, pages: Sequence[Sequence[int]]) -> None:
        scatter_pages(self.project(states), pool, page_table(pages, pool.device))


def is_packed(pool: Tensor, n_audio_ctx: int) -> bool:
    """Whether a pool [n_pages, L, 2, page_frames, H, Dh] packs shorter windows."""
    # A GPU's kernels read all pages by the same strides.
    return pool.device.type == "cpu" and pool.shape[3] == n_audio_ctx


def packed_page(page: Tensor, n_frames: int) -> Tensor:
    """View the beginning of page [L, 2, page_frames, H, Dh] as [L, 2, n_frames, H, Dh]."""
    n_layer, two, _, n_head, head_dim = page.shape
    shape = (n_layer, two, n_frames, n_head, head_dim)
    return page.flatten()[: math.prod(shape)].view(shape)


def as_kv_pool(pool: Tensor) -> Tensor:
    """View a pool of states [n_pages, T, n] as [n_pages, 1, 1, T, 1, n]."""
    return pool[:, None, None, :, None]
