"""What `several.kernels` reads and writes beside a forward's own arrays. Knows no numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from decoder_worker.cpu.fused_arrays import n_head_units, n_likely_units, n_units

# Places in `Run.control`.
ENDED, LEFT, WAITED_BEFORE = range(3)


class Embedding(NamedTuple):
    """tokens [n_vocab, d], positions [n_text_ctx, d]: float32, or the bits of bfloat16 as uint16.

    Their sum is rounded to that dtype.
    """

    tokens: Any
    positions: Any


class Choice(NamedTuple):
    """The rules of sampling, as `LogitRules` has them, and where slots keep what they remember.

    table: int64, the slots'. suppressed, never: float32 [n_vocab]. not_first: int64.
    n_words: tokens before end of text.
    """

    table: Any
    suppressed: Any
    never: Any
    not_first: Any
    marks: Any
    n_words: int


class Run(NamedTuple):
    """One run of steps.

    slots: int64 [n]. tokens int64, logprobs float32: [most steps, n], what each step chose.
    logits: float32 [n, n_vocab], of the last step.
    control: int64 [3]. ENDED: the steps that were made, 0 while the run goes on; LEFT: whether a
        helper has left; WAITED_BEFORE: the team's counter of that name when the run began.
    interrupt: int64 [1], set by any thread: the run is to end with its step.
    """

    slots: Any
    tokens: Any
    logprobs: Any
    logits: Any
    control: Any
    interrupt: Any


def new_run(slots: Any, most: int, logits: Any, interrupt: Any) -> Run:
    n = len(slots)
    tokens, logprobs = np.empty((most, n), np.int64), np.empty((most, n), np.float32)
    return Run(slots, tokens, logprobs, logits, np.zeros(3, np.int64), interrupt)


def step_units(units: Any, n_layer: int, n_rows: int, n_vocab: int, n_words: int | None) -> Any:
    """int64 [3]: units of a step's layers, of its head, and of all of it.

    units: int64 [N_PHASES], of each phase of a layer. n_words: of a coarse head; None: there is
    none. A step has one unit to begin with, and one to choose each row's token.
    """
    layers = n_units(units, n_layer)
    coarse = 0 if n_words is None else n_likely_units(n_rows, n_vocab, n_words)
    head = coarse or n_head_units(n_vocab)
    return np.array([layers, head, 1 + layers + head + n_rows], np.int64)
