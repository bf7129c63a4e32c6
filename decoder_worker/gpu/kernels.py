"""The decoder's Triton kernels: greedy sampling and the append. Imported only where Triton is."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from decoder_worker.gpu.greedy import PART, SPANS
from decoder_worker.sampling.slots import (
    BEFORE_IS,
    LAST_IS,
    LAST_TIMESTAMP,
    LIMIT,
    N_COLUMNS,
    N_SAMPLED,
    POSITION,
    TIMED,
    TOKEN,
)

token_column = tl.constexpr(TOKEN)
position_column = tl.constexpr(POSITION)
n_sampled_column = tl.constexpr(N_SAMPLED)
last_timestamp_column = tl.constexpr(LAST_TIMESTAMP)
last_is_column = tl.constexpr(LAST_IS)
before_is_column = tl.constexpr(BEFORE_IS)
timed_column = tl.constexpr(TIMED)
limit_column = tl.constexpr(LIMIT)
NEVER = tl.constexpr(float("-inf"))
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def reduce_logits(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    logits,  # float32 [n, n_vocab]
    index,  # int64 [n]
    table,  # int64 [n_slots, n_columns]
    suppressed,  # float32 [n_vocab]
    begin,  # int64 [n_begin]
    highest,  # float32 [n, spans, n_parts]
    sums,  # float32, the same
    places,  # int32, the same
    eot,
    no_timestamps,
    timestamp_begin,
    latest_first,
    n_vocab,
    n_parts,
    n_begin: tl.constexpr,
    n_columns: tl.constexpr,
    spans: tl.constexpr,
    size: tl.constexpr,  # tokens of a part
):
    row, part = tl.program_id(0), tl.program_id(1)
    slot = table + tl.load(index + row) * n_columns
    first = tl.load(slot + n_sampled_column) == 0
    timed = tl.load(slot + timed_column) != 0
    last_is = tl.load(slot + last_is_column) != 0
    before_is = tl.load(slot + before_is_column) != 0
    token = part * size + tl.arange(0, size)
    inside = token < n_vocab
    given = tl.load(logits + row.to(tl.int64) * n_vocab + token, mask=inside, other=NEVER)
    broken = tl.max((given != given).to(tl.int32), 0) > 0
    values = given + tl.load(suppressed + token, mask=inside, other=0.0)
    for i in tl.static_range(n_begin):
        values = tl.where(first & (token == tl.load(begin + i)), NEVER, values)
    values = tl.where(timed & (token == no_timestamps), NEVER, values)
    # A segment's first timestamp may repeat the last one's end; its own end must be later.
    ends_segment = last_is & (before_is == 0)
    later = tl.load(slot + last_timestamp_column) + tl.where(ends_segment, 0, 1)
    low = tl.where(timed, timestamp_begin + tl.maximum(later, 0), timestamp_begin)
    high = tl.where(first, tl.minimum(n_vocab, timestamp_begin + latest_first + 1), n_vocab)
    high = tl.where(last_is & before_is, low, high)
    high = tl.where(timed, high, n_vocab)
    for span in tl.static_range(spans):
        if span == 0:
            within = token < eot
        elif span == 1:
            within = (token >= eot) & (token < timestamp_begin)
        else:
            within = (token >= low) & (token < high)
        own = tl.where(within, values, NEVER)
        top = tl.max(own, 0)
        base = tl.where(top == NEVER, 0.0, top)
        total = tl.sum(tl.exp(own - base), 0)
        place = tl.min(tl.where(own == top, token, NOWHERE), 0)
        where = (row * spans + span) * n_parts + part
        if span == 0:
            # Triton compares a module's constants before each launch, and no NaN equals itself.
            top = tl.where(broken, float("nan"), top)
        tl.store(highest + where, top)
        tl.store(sums + where, total)
        tl.store(places + where, place)


@triton.jit
def combine_parts(highest, sums, places, at, inside):  # type: ignore[no-untyped-def]
    """A span's highest logit, sum of exponentials over it, first place, and whether it has NaN."""
    tops = tl.load(highest + at, mask=inside, other=NEVER)
    broken = tl.max((tops != tops).to(tl.int32), 0) > 0
    tops = tl.where(tops != tops, NEVER, tops)
    top = tl.max(tops, 0)
    base = tl.where(top == NEVER, 0.0, top)
    parts = tl.load(sums + at, mask=inside, other=0.0)
    total = tl.sum(tl.where(tops == NEVER, 0.0, parts * tl.exp(tops - base)), 0)
    found = tl.load(places + at, mask=inside, other=NOWHERE)
    return top, total, tl.min(tl.where(tops == top, found, NOWHERE), 0), broken


@triton.jit  # type: ignore[untyped-decorator]
def sample_greedy(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    highest,  # float32 [n, 3, n_parts]
    sums,
    places,
    index,  # int64 [n]
    table,  # int64 [n_slots, n_columns]
    tokens,  # int64 [n]
    logprobs,  # float32 [n]
    eot,
    timestamp_begin,
    n_parts: tl.constexpr,
    n_columns: tl.constexpr,
    block: tl.constexpr,  # a power of two, at least n_parts
):
    row = tl.program_id(0)
    slot = table + tl.load(index + row) * n_columns
    n_sampled = tl.load(slot + n_sampled_column)
    timed = tl.load(slot + timed_column) != 0
    last_is = tl.load(slot + last_is_column) != 0
    before_is = tl.load(slot + before_is_column) != 0
    part = tl.arange(0, block)
    inside, at = part < n_parts, row * 3 * n_parts + part
    word, words, word_place, broken = combine_parts(highest, sums, places, at, inside)
    text, texts, text_place, _ = combine_parts(highest, sums, places, at + n_parts, inside)
    stamp, stamps, stamp_place, _ = combine_parts(highest, sums, places, at + 2 * n_parts, inside)
    word = tl.where(timed & last_is & (before_is == 0), NEVER, word)
    # All timestamps together against the best single other token that is still allowed.
    together = tl.where(stamp == NEVER, NEVER, tl.log(stamps) + stamp)
    stamps_only = timed & ((n_sampled == 0) | (together > tl.maximum(word, text)))
    word = tl.where(stamps_only, NEVER, word)
    text = tl.where(stamps_only, NEVER, text)
    top = tl.maximum(tl.maximum(word, text), stamp)
    sound = (broken == 0) & (top > NEVER) & (top < -NEVER)
    base = tl.where(sound, top, 0.0)
    total = tl.where(word == NEVER, 0.0, words * tl.exp(word - base))
    total += tl.where(text == NEVER, 0.0, texts * tl.exp(text - base))
    total += tl.where(stamp == NEVER, 0.0, stamps * tl.exp(stamp - base))
    place = tl.where(text == top, text_place, stamp_place)
    place = tl.where(word == top, word_place, place)
    token = tl.where(sound, place, 0).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, tl.where(sound, -tl.log(total), float("nan")))
    # As `slots.advance` writes it.
    is_stamp = token >= timestamp_begin
    goes_on = (token != eot) & (n_sampled + 1 < tl.load(slot + limit_column))
    position = tl.load(slot + position_column) + tl.where(goes_on, 1, 0)
    latest = tl.load(slot + last_timestamp_column)
    tl.store(slot + token_column, token)
    tl.store(slot + position_column, position)
    tl.store(slot + n_sampled_column, n_sampled + 1)
    tl.store(slot + last_timestamp_column, tl.where(is_stamp, token - timestamp_begin, latest))
    tl.store(slot + last_is_column, tl.where(is_stamp, 1, 0).to(tl.int64))
    tl.store(slot + before_is_column, tl.where(last_is | (n_sampled == 0), 1, 0).to(tl.int64))


def launch_greedy(*given: Any) -> None:
    """Takes the operands of the operator `decoder_worker.gpu.greedy.sample_greedy`, in order."""
    *reduced, tokens, logprobs = given
    launch_reduce(*reduced)
    (_, index, table, _, _, eot, _, timestamp_begin, _), parts = reduced[:9], reduced[9:]
    launch_sample(*parts, index, table, eot, timestamp_begin, tokens, logprobs)


def launch_reduce(*given: Any) -> None:
    """Takes the operands up to the parts, which it fills."""
    logits, begin = given[0], given[4]
    n, n_vocab = logits.shape
    assert logits.is_contiguous()
    n_parts = triton.cdiv(n_vocab, PART)
    reduce_logits[(n, n_parts)](
        *given[:5],
        *given[9:],  # what is written; the kernel has the numbers behind all tensors
        *given[5:9],
        n_vocab,
        n_parts,
        len(begin),
        N_COLUMNS,
        SPANS,
        PART,
    )


def launch_sample(*given: Any) -> None:
    """Takes parts, index, table, eot, timestamp_begin, tokens, logprobs."""
    n, _, n_parts = given[0].shape
    sample_greedy[(n,)](
        *given[:5],
        *given[7:],
        *given[5:7],
        n_parts,
        N_COLUMNS,
        triton.next_power_of_2(n_parts),
    )


@triton.jit  # type: ignore[untyped-decorator]
def append_qkv(  # type: ignore[no-untyped-def]  # a program for each token's query, key and value
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


def launch_append(*given: Any) -> None:
    """Takes the operands of the operator `append_qkv` of `attention.operators`, in order."""
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
