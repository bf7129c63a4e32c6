"""The sum of two embeddings as one Triton kernel: a program for each row.

Imported only where Triton is. Where there is no GPU its tests run it interpreted, and compile it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def embed(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    tokens,  # int64 [n], of any stride
    positions,  # int64 [n], of any stride
    by_token,  # [n_vocab, width]
    by_position,  # [n_text_ctx, width]
    out,  # [n, width]
    token_stride,
    position_stride,
    width: tl.constexpr,
    block: tl.constexpr,  # a power of two, at least the width
):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    token = tl.load(tokens + row * token_stride)
    position = tl.load(positions + row * position_stride)
    word = tl.load(by_token + token * width + column, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(by_position + position * width + column, mask=inside, other=0.0)
    total = word + place.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def launch(*given: Any) -> None:
    """The operands of the operator `embed` of `decoder_worker.gpu.embed`, in order."""
    tokens, positions, by_token, by_position, out = given
    n, width = out.shape
    for tensor in (by_token, by_position, out):
        assert tensor.is_contiguous()
    embed[(n,)](
        *given,
        tokens.stride(0),
        positions.stride(0),
        width,
        triton.next_power_of_2(width),
    )
