"""The decoder's layers and logits over a few rows, as one compiled program for several threads.

Few rows are bound by memory bandwidth, which no core can use up alone: so all threads of a team go
through the same phases and share each one's units. Sums are float32 throughout. Imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from cluster.common.kernels.cpu.arithmetic import erf, number
from cluster.common.kernels.cpu.rows import SUMS, add_norm_row
from cluster.common.kernels.cpu.tile_instructions import begin_tiles, end_tiles
from decoder_worker.cpu.arrays import (
    CROSS,
    CROSS_OUT,
    CROSS_Q,
    FC1,
    FC2,
    LOGITS,
    N_PHASES,
    OUTPUTS,
    QKV,
    SELF,
    SELF_OUT,
)
from decoder_worker.cpu.attention_kernels import append, attend_pieces, join
from decoder_worker.cpu.tile_products import (
    int8_tile_product,
    split_in_8_bits,
    split_rows,
    tile_product,
)
from decoder_worker.cpu.vector_products import int8_vector_product, split_for_vectors
from decoder_worker.cpu.work_sharing import claim, conclude, finish, wait

_HALF, _ONE, _SQRT_HALF = np.float32(0.5), np.float32(1), np.float32(0.7071067811865476)


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_one(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    for n in range(first, last):
        row = weight[n]
        a = np.float32(0)
        for c in range(len(row)):
            a += x[c] * number(row[c])
        out[n] = a * scale[n]


@njit(fastmath=SUMS, nogil=True, cache=True)
def _product_of_four(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    for n in range(first, last):
        row, s = weight[n], scale[n]
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(row)):
            w = number(row[i])
            a += x0[i] * w
            b += x1[i] * w
            c += x2[i] * w
            d += x3[i] * w
        out0[n], out1[n], out2[n], out3[n] = a * s, b * s, c * s, d * s


def begin_product(x: Any, weight: Any, tiles: Any) -> Any:
    """Prepare x float32 [n, n_in] for `product` on this thread, until `end_product`."""
    raise NotImplementedError("only inside a kernel")


@overload(begin_product)
def _begin_product(x, weight, tiles):
    if isinstance(tiles, types.NoneType):
        return lambda x, weight, tiles: x
    if isinstance(tiles, types.Boolean):
        return lambda x, weight, tiles: split_for_vectors(x)

    def split_in_16_bits(x, weight, tiles):
        begin_tiles(tiles)
        return split_rows(x)

    def split_for_int8(x, weight, tiles):
        begin_tiles(tiles)
        return split_in_8_bits(x)

    return split_for_int8 if weight.dtype == types.int8 else split_in_16_bits


def end_product(tiles: Any) -> None:
    raise NotImplementedError("only inside a kernel")


@overload(end_product)
def _end_product(tiles):
    if isinstance(tiles, types.Array):
        return lambda tiles: end_tiles()
    return lambda tiles: None


def product(x: Any, weight: Any, scale: Any, tiles: Any, first: Any, last: Any, out: Any) -> None:
    """Compute out[:, first:last] from `begin_product`'s result, reading weights once."""
    raise NotImplementedError("only inside a kernel")


@overload(product)
def _product(x, weight, scale, tiles, first, last, out):
    if isinstance(tiles, types.NoneType):
        return lambda x, weight, scale, tiles, first, last, out: plain_product(
            x, weight, scale, first, last, out
        )
    if isinstance(tiles, types.Boolean):
        return lambda x, weight, scale, tiles, first, last, out: int8_vector_product(
            x, weight, scale, first, last, out
        )
    if weight.dtype == types.int8:
        return lambda x, weight, scale, tiles, first, last, out: int8_tile_product(
            x, weight, scale, first, last, out
        )
    return lambda x, weight, scale, tiles, first, last, out: tile_product(
        x, weight, scale, first, last, out
    )


@njit(nogil=True, cache=True)
def plain_product(x: Any, weight: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """Compute out[:, first:last] of x float32 [n, n_in], reading a block of weights once."""
    fours = len(x) // 4 * 4
    for row in range(0, fours, 4):
        _product_of_four(x[row : row + 4], weight, scale, first, last, out[row : row + 4])
    for row in range(fours, len(x)):
        _product_of_one(x[row], weight, scale, first, last, out[row])


# In Python's error model a division may raise, which keeps loops from being vectorized.
@njit(fastmath=SUMS, error_model="numpy", nogil=True, cache=True)
def finish_product(out: Any, bias: Any, first: Any, last: Any, gelu: Any) -> None:
    for r in range(len(out)):
        row = out[r]
        if gelu:
            for n in range(first, last):
                x = row[n] + bias[n]
                row[n] = x * _HALF * (_ONE + erf(x * _SQRT_HALF))
        else:
            for n in range(first, last):
                row[n] += bias[n]


@njit(nogil=True, cache=True)
def norm(norm: Any, x: Any, delta: Any, normed: Any) -> None:
    for r in range(len(x)):
        add_norm_row(x[r], delta[r], norm[0], norm[1], normed[r])


@njit(nogil=True, cache=True)
def _multiply(
    x: Any,
    weights: Any,
    tiles: Any,
    gelu: Any,
    out: Any,
    counters: Any,
    begin: Any,
    end: Any,
) -> Any:
    """Run a product's units; whether this thread finished the last one of all."""
    weight, scale, bias = weights
    n_out, n_done = len(bias), 0
    rows = begin_product(x, weight, tiles)
    while True:
        unit = claim(counters, end)
        if unit < 0:
            break
        first = (unit - begin) * OUTPUTS
        last = min(n_out, first + OUTPUTS)
        product(rows, weight, scale, tiles, first, last, out)
        finish_product(out, bias, first, last, gelu)
        n_done = finish(counters)
    end_product(tiles)
    return n_done == end


@njit(nogil=True, cache=True)
def _of(products: Any, layer: Any) -> Any:
    return products.weight[layer], products.scale[layer], products.bias[layer]


@njit(nogil=True, cache=True)
def run_layers(
    layers: Any,
    own: Any,
    cross: Any,
    memory: Any,
    units: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    """Run all layers, from `memory.x` to `memory.normed`, on every thread of a team.

    The thread that finished a phase's last unit also does what is too little to share, as a unit.
    """
    x, normed, delta, attended = memory.x, memory.normed, memory.delta, memory.attended
    query, qkv, hidden = memory.query, memory.qkv, memory.hidden
    results = (memory.highest, memory.total, memory.mixed)
    norms, tiles = layers.norms, layers.tiles
    if claim(counters, begin + 1) >= 0:
        delta[:] = np.float32(0)
        norm(norms[0], x, delta, normed)
        finish(counters)
    begin += 1
    for layer in range(len(layers.qkv.bias)):
        for phase in range(N_PHASES):
            if not wait(counters, begin, leads):
                return
            end = begin + units[phase]
            if phase == QKV:
                if _multiply(
                    normed, _of(layers.qkv, layer), tiles, False, qkv, counters, begin, end
                ):
                    append(qkv, own.pool, own.last, layer)
                    conclude(counters)
            elif phase == SELF:
                if attend_pieces(qkv, own, layer, results, counters, begin, end):
                    join(own.n_pieces, results, attended)
                    conclude(counters)
            elif phase == SELF_OUT:
                p = _of(layers.self_out, layer)
                if _multiply(attended, p, tiles, False, delta, counters, begin, end):
                    norm(norms[3 * layer + 1], x, delta, normed)
                    conclude(counters)
            elif phase == CROSS_Q:
                p = _of(layers.cross_q, layer)
                if _multiply(normed, p, tiles, False, query, counters, begin, end):
                    conclude(counters)
            elif phase == CROSS:
                if attend_pieces(query, cross, layer, results, counters, begin, end):
                    join(cross.n_pieces, results, attended)
                    conclude(counters)
            elif phase == CROSS_OUT:
                p = _of(layers.cross_out, layer)
                if _multiply(attended, p, tiles, False, delta, counters, begin, end):
                    norm(norms[3 * layer + 2], x, delta, normed)
                    conclude(counters)
            elif phase == FC1:
                p = _of(layers.fc1, layer)
                if _multiply(normed, p, tiles, True, hidden, counters, begin, end):
                    conclude(counters)
            elif phase == FC2:
                p = _of(layers.fc2, layer)
                if _multiply(hidden, p, tiles, False, delta, counters, begin, end):
                    norm(norms[3 * layer + 3], x, delta, normed)
                    conclude(counters)
            begin = end + 1
    wait(counters, begin, leads)


@njit(nogil=True, cache=True)
def run_head(x: Any, head: Any, out: Any, counters: Any, begin: Any, leads: Any) -> None:
    n_vocab = out.shape[1]
    end = begin + (n_vocab + LOGITS - 1) // LOGITS
    rows = begin_product(x, head.weight, head.tiles)
    while True:
        unit = claim(counters, end)
        if unit < 0:
            break
        first = (unit - begin) * LOGITS
        last = min(n_vocab, first + LOGITS)
        product(rows, head.weight, head.scale, head.tiles, first, last, out)
        finish(counters)
    end_product(head.tiles)
    wait(counters, end, leads)
