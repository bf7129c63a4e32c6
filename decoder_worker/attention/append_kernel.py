"""The append as one Triton kernel: a program for each token's query, key and value.

Imported only where Triton is. Where there is no GPU its tests run it interpreted, and compile it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def append_qkv(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    qkv,  # [n_tokens, 3, width]
    bias,  # [3, width]
    entries,  # int32 [n_tokens]
    positions,  # int32 [n_tokens]
    indptr,  # int32 [n_entries + 1]
    indices,  # int32
    pool,  # [page, layer, 2, page_size, width]
    q,  # [n_tokens, width]
    layer,
    n_layer: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,  # a power of two, at least the width
):
    token, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, block)
    inside = column < width
    place = part * width + column
    values = tl.load(qkv + token * 3 * width + place, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        values += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        tl.store(q + token * width + column, values.to(q.dtype.element_ty), mask=inside)
    else:
        position = tl.load(positions + token)
        own = tl.load(indptr + tl.load(entries + token))
        page = tl.load(indices + own + position // page_size).to(tl.int64)
        row = ((page * n_layer + layer) * 2 + part - 1) * page_size + position % page_size
        tl.store(pool + row * width + column, values.to(pool.dtype.element_ty), mask=inside)


def launch(*given: Any) -> None:
    """The operands of the operator `append_qkv` of `attention.operators`, in order."""
    *tables, pool, layer, q = given
    qkv, bias = tables[:2]
    n_layer, _, page_size, n_head, head_dim = pool.shape[1:]
    width = n_head * head_dim
    for tensor in (qkv, pool, q):
        assert tensor.is_contiguous()
    assert qkv.shape[1] == 3 * width
    append_qkv[(len(qkv), 3)](
        *tables,
        pool,
        q,
        layer,
        n_layer,
        page_size,
        width,
        bias is not None,
        triton.next_power_of_2(width),
    )
