"""The decoder's layers and logits over a few rows, as one compiled program for several threads.

For few rows a forward is bound by reading weights and pages, and a core alone reaches a part of
what the memory gives; so all threads of a team go through the same phases and share out each one's
units (`decoder_worker.cpu.work_sharing`).
Sums are float32 throughout: only what lies in memory, weights and pages, is narrower.

Imports numba: `decoder_worker.cpu.step_kernels` builds this in the background.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

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
from decoder_worker.cpu.fused_parts import (
    begin_product,
    end_product,
    finish_product,
    norm,
    product,
)
from decoder_worker.cpu.work_sharing import claim, conclude, finish, wait


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
    """A product's units, while there are any. Whether all are done by this thread's last one."""
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
    """All layers, from `memory.x` to `memory.normed`; every thread of a team calls this.

    What is too little to share out is done by whoever did a phase's last unit, and counts as one
    unit more.
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
