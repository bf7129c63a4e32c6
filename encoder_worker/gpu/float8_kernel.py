"""Rows in 8 bits with their scales, after GELU or as they are: a Triton program for each row.

Imported only where Triton is. Where there is no GPU its tests run it interpreted, and compile it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cluster.common.kernels.gpu.norm import LEAST_SCALE

WARPS_ABOVE = 4096  # numbers of a row for which four warps have too many each


@triton.jit  # type: ignore[untyped-decorator]
def scale_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    x,  # [n, width]
    out,  # [n, width], of 8 bits
    scale,  # float32 [n]
    width: tl.constexpr,
    gelu: tl.constexpr,
    most: tl.constexpr,  # largest number of `out`
    least_scale: tl.constexpr,
    block: tl.constexpr,  # a power of two, at least the width
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if gelu:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    size = tl.maximum(tl.max(tl.abs(values), 0) / most, least_scale)
    tl.store(scale + row, size)
    values = values / size
    values = tl.where(values > most, most, tl.where(values < -most, -most, values))
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=inside)


def launch(x: Tensor, gelu: bool, out: Tensor, scale: Tensor) -> None:
    """See `encoder_worker.gpu.encoder.Scaled.of`."""
    n, width = x.shape
    assert x.is_contiguous()
    assert out.is_contiguous()
    scale_rows[(n,)](
        x,
        out,
        scale,
        width,
        gelu,
        torch.finfo(out.dtype).max,
        LEAST_SCALE,
        triton.next_power_of_2(width),
        num_warps=4 if width <= WARPS_ABOVE else 8,
    )
