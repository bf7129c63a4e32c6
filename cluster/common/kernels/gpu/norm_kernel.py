"""The residual add with its norm as one Triton kernel: a program for each row.

Imported only where Triton is. Where there is no GPU its tests run it interpreted, and compile it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cluster.common.kernels.gpu.norm import LEAST_SCALE
from cluster.common.model.layers import LAYER_NORM_EPS


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    x,  # [n, width], read and, with a delta, written
    delta,  # [n, width]
    bias,  # [width]
    weight,
    shift,
    out,  # [n, width]
    scale,  # float32 [n]
    width: tl.constexpr,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
    most: tl.constexpr,  # largest number of an `out` in 8 bits, 0 for others
    least_scale: tl.constexpr,
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
    if most > 0:
        largest = tl.max(tl.abs(normed), 0)
        size = tl.maximum(largest / most, least_scale)
        tl.store(scale + row, size)
        normed = normed / size
        normed = tl.where(normed > most, most, tl.where(normed < -most, -most, normed))
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


def launch(*given: Any) -> None:
    """The operands of the operator `add_norm` of `cluster.common.kernels.gpu.norm`, in order."""
    x, delta, bias, _, _, out, scale = given
    n, width = x.shape
    for tensor in (x, out) if delta is None else (x, out, delta):
        assert tensor.is_contiguous()
        assert tensor.shape == x.shape
    add_norm[(n,)](
        *given,
        width,
        delta is not None,
        bias is not None,
        0.0 if scale is None else torch.finfo(out.dtype).max,
        LEAST_SCALE,
        LAYER_NORM_EPS,
        triton.next_power_of_2(width),
    )
