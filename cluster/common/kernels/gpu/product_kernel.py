"""The product of few rows as one Triton kernel: a program for a few of the outputs, and all rows.

What limits it is how many bytes of weights are on their way at once, so the outputs are cut small
enough that every multiprocessor has some, and several steps of a program's loop are loaded ahead.
Nothing is split along the inner dimension, which would need another kernel to add the parts up.

Imported only where Triton is. Where there is no GPU its tests run it interpreted, and compile it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from cluster.common.kernels.gpu.product import INNER_MULTIPLE, MAX_ROWS, outer_block
from cluster.common.model.layers import LAYER_NORM_EPS

LEAST_ROWS = 16  # of a tile: what tensor cores take at once
STAGES = 4  # steps of a program's loop that are loaded ahead
SHARED_BYTES = 96 * 1024  # of 99 KiB that a program may have on compute capability 8.9
INNER_BLOCKS = (256, 128, 64, 32, 16)


@triton.jit  # type: ignore[untyped-decorator]
def few_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    x,  # [n, n_in]
    weight,  # [n_out, n_in]
    bias,  # [n_out]
    gain,  # [n_in]
    sums,  # [n_out]
    out,  # [n, n_out]
    n,
    n_out,
    n_in: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    gelu: tl.constexpr,
    add: tl.constexpr,
    eps: tl.constexpr,
    rows: tl.constexpr,
    outer: tl.constexpr,
    inner: tl.constexpr,  # divides n_in
):
    row = tl.arange(0, rows)[:, None]
    column = tl.program_id(0) * outer + tl.arange(0, outer)
    is_row, is_column = row < n, column < n_out
    step = tl.arange(0, inner)
    total = tl.zeros((rows, outer), tl.float32)
    added = tl.zeros((rows,), tl.float32)
    squares = tl.zeros((rows,), tl.float32)
    for begin in range(0, n_in, inner):
        k = begin + step
        w = tl.load(
            weight + column[None, :].to(tl.int64) * n_in + k[:, None],
            mask=is_column[None, :],
            other=0.0,
        )
        values = tl.load(x + row * n_in + k[None, :], mask=is_row, other=0.0)
        if has_norm:
            full = values.to(tl.float32)
            added += tl.sum(full, 1)
            squares += tl.sum(full * full, 1)
            fed = (full * tl.load(gain + k)[None, :].to(tl.float32)).to(w.dtype)
        else:
            fed = values.to(w.dtype)
        total = tl.dot(fed, w, total, input_precision="ieee")
    if has_norm:
        mean = added / n_in
        variance = tl.maximum(squares / n_in - mean * mean, 0.0)
        factor = 1.0 / tl.sqrt(variance + eps)
        summed = tl.load(sums + column, mask=is_column, other=0.0)
        total = (total - mean[:, None] * summed[None, :]) * factor[:, None]
    if has_bias:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if gelu:
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    place = out + row * n_out + column[None, :]
    inside = is_row & is_column[None, :]
    if add:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def inner_block(n_in: int, row_bytes: int) -> int:
    """Of the inner dimension in one step of the loop, which divides it.

    row_bytes: that a step takes for each number of it; STAGES steps must fit shared memory.

    Raises:
        ValueError: nothing that tensor cores take does.
    """
    for size in INNER_BLOCKS:
        if n_in % size == 0 and STAGES * size * row_bytes <= SHARED_BYTES:
            return size
    raise ValueError(f"rows of {n_in} numbers: the kernel takes multiples of {INNER_MULTIPLE}")


def launch(*given: Any) -> None:
    """The operands of the operator `few_rows` of `cluster.common.kernels.gpu.product`, in order."""
    *operands, gelu, add, out = given
    x, weight, bias, gain, _ = operands
    (n, n_in), n_out = x.shape, len(weight)
    assert n <= MAX_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    outer, rows = outer_block(n_out), max(LEAST_ROWS, triton.next_power_of_2(n))
    row_bytes = rows * x.itemsize + outer * weight.itemsize
    few_rows[(triton.cdiv(n_out, outer),)](
        *operands,
        out,
        n,
        n_out,
        n_in,
        bias is not None,
        gain is not None,
        gelu,
        add,
        LAYER_NORM_EPS,
        rows,
        outer,
        inner_block(n_in, row_bytes),
        num_stages=STAGES,
    )
