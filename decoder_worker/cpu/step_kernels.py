"""Decode steps of a few rows as one compiled program, without Python between. Imports numba."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from cluster.common.kernels.cpu.arithmetic import nearest_bfloat16, number
from decoder_worker.cpu.arrays import (
    ENDED,
    HEAD_DIM,
    LEFT,
    LOGITS,
    N_PHASES,
    WAITED_BEFORE,
    Choice,
    Embedding,
    Kinds,
    Layers,
    Products,
    in_blocks,
    new_memory,
    new_run,
    plain_head,
    step_units,
)
from decoder_worker.cpu.attention_kernels import cut, empty_pages
from decoder_worker.cpu.fused_kernels import run_head, run_layers
from decoder_worker.cpu.sampling_kernels import sample_rows
from decoder_worker.cpu.step_team import WAITED, new_counters
from decoder_worker.cpu.work_sharing import claim, finish, is_past, skip_to, wait
from decoder_worker.sampling.logit_rules import Marks
from decoder_worker.sampling.slots import N_COLUMNS, POSITION, TOKEN


def _sum_of(token: Any, position: Any) -> Any:
    """Add elements of a token's and a position's embedding, in their dtype: float32."""
    raise NotImplementedError("only inside a kernel")


@overload(_sum_of)
def _sum_of_stored(token, position):
    if token == types.uint16:
        return lambda token, position: nearest_bfloat16(number(token) + number(position))
    return lambda token, position: token + position


@njit(nogil=True, cache=True)
def _embed(slots: Any, table: Any, embedding: Any, x: Any) -> None:
    for r in range(len(slots)):
        slot = table[slots[r]]
        token, position = embedding.tokens[slot[TOKEN]], embedding.positions[slot[POSITION]]
        for c in range(x.shape[1]):
            x[r, c] = _sum_of(token[c], position[c])


@njit(nogil=True, cache=True)
def _move_on(own: Any) -> None:
    """Advance each row by a position, within its last page and piece."""
    pieces, n_pieces, last = own.pieces, own.n_pieces, own.last
    for i in range(len(pieces)):
        if pieces[i, 5] + 1 == n_pieces[pieces[i, 0]]:
            pieces[i, 4] += 1
    for r in range(len(last)):
        last[r, 1] += 1


@njit(nogil=True, cache=True)
def _ends(run: Any, step: Any, eot: Any, counters: Any) -> Any:
    """Whether the run ends before `step`: a row ended, an interrupt, or helpers left or lag."""
    control = run.control
    if run.interrupt[0] != 0 or control[LEFT] != 0 or counters[WAITED] != control[WAITED_BEFORE]:
        return True
    for r in range(len(run.slots)):
        if run.tokens[step - 1, r] == eot or not np.isfinite(run.logprobs[step - 1, r]):
            return True
    return False


@njit(nogil=True, cache=True)
def _begin_step(
    step: Any, embedding: Any, own: Any, memory: Any, choice: Any, run: Any, counters: Any
) -> None:
    """Embed a step's tokens, or note that the run has ended."""
    if step == 0:
        run.control[WAITED_BEFORE] = counters[WAITED]
    elif _ends(run, step, choice.marks.eot, counters):
        run.control[ENDED] = step
        return
    else:
        _move_on(own)
    _embed(run.slots, choice.table, embedding, memory.x)


@njit(nogil=True, cache=True)
def _choose(
    step: Any,
    head: Any,
    memory: Any,
    choice: Any,
    run: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    logits = run.logits
    run_head(memory.normed, head, logits, counters, begin, leads)
    begin += (logits.shape[1] + LOGITS - 1) // LOGITS
    if wait(counters, begin, leads):
        sample_rows(
            logits,
            run.slots,
            choice.table,
            choice.suppressed,
            choice.not_first,
            choice.marks,
            run.tokens[step],
            run.logprobs[step],
            counters,
            begin,
            leads,
        )


@njit(nogil=True, cache=True)
def _run_steps(
    embedding: Any,
    layers: Any,
    head: Any,
    own: Any,
    cross: Any,
    memory: Any,
    units: Any,
    parts: Any,
    choice: Any,
    run: Any,
    counters: Any,
    begin: Any,
    leads: Any,
) -> None:
    """Run steps; every thread of a team calls this, with the `Pages` of the first step.

    own is changed. units: of each phase of a layer. parts: int64 [3], as from `step_units`.
    """
    control, most = run.control, len(run.tokens)
    end = begin + most * parts[2]
    for step in range(most):
        behind = begin + parts[2]
        if not leads and is_past(counters, behind):
            begin = behind
            continue
        if not wait(counters, begin, leads):
            control[LEFT] = 1
            return
        if claim(counters, begin + 1) >= 0:
            _begin_step(step, embedding, own, memory, choice, run, counters)
            finish(counters)
        begin += 1
        if not wait(counters, begin, leads):
            control[LEFT] = 1
            return
        if control[ENDED] != 0:
            break
        run_layers(layers, own, cross, memory, units, counters, begin, leads)
        begin += parts[0]
        if not wait(counters, begin, leads):
            control[LEFT] = 1
            return
        _choose(step, head, memory, choice, run, counters, begin, leads)
        begin = behind
    if not leads:
        return
    if control[ENDED] == 0:
        control[ENDED] = most
    else:
        skip_to(counters, end)


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """All but `cut` are jobs of a `StepTeam` once their first arguments are bound."""

    cut: Callable[..., int]
    layers: Callable[..., Any]
    head: Callable[..., Any]
    steps: Callable[..., Any]


def build(kinds: Kinds) -> DecoderKernels:
    """Compile (or load); embeddings have the dtype of `kinds.own`."""
    d, n_mlp, n_vocab, tiles = HEAD_DIM, 4 * HEAD_DIM, 4 * HEAD_DIM, kinds.tiles

    def products(n_out: int, n_in: int) -> Products:
        plain, array = np.zeros((1, n_out), np.float32), np.zeros((n_out, n_in), kinds.weight)
        return Products((in_blocks(array) if kinds.blocks else array)[None], plain, plain)

    square, norms = products(d, d), np.zeros((4, 2, d), np.float32)
    wide, narrow = products(n_mlp, d), products(d, n_mlp)
    layers = Layers(products(3 * d, d), square, square, square, wide, narrow, norms, tiles)
    memory, units = new_memory(1, 1, 1, d, n_mlp), np.ones(N_PHASES, np.int64)
    memory.x[:] = 0
    in_int8, head_tiles = kinds.head is np.int8, kinds.head_tiles
    vocabulary = plain_head(torch.zeros(n_vocab, d), int8=in_int8, tiles=head_tiles)
    embedding = Embedding(np.zeros((n_vocab, d), kinds.own), np.zeros((2, d), kinds.own))
    plain, no_ids = np.zeros(n_vocab, np.float32), np.zeros(0, np.int64)
    eot = n_vocab // 2
    choice = Choice(
        np.zeros((1, N_COLUMNS), np.int64), plain, no_ids, Marks(eot, eot + 1, eot + 2, 1)
    )
    logits = np.zeros((1, n_vocab), np.float32)
    run = new_run(np.zeros(1, np.int64), 1, logits, np.zeros(1, np.int64))
    parts = step_units(units, 1, 1, n_vocab)
    pages = empty_pages(kinds.own, True), empty_pages(kinds.cross, False)
    run_layers(layers, *pages, memory, units, new_counters(), 0, True)
    run_head(memory.normed, vocabulary, logits, new_counters(), 0, True)
    given = (embedding, layers, vocabulary, *pages, memory, units, parts, choice, run)
    _run_steps(*given, new_counters(), 0, True)
    return DecoderKernels(cut, run_layers, run_head, _run_steps)
