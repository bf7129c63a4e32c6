"""Several decode steps of a few rows at once on a CPU, by `cpu.several.kernels`.

For sequences whose next token is what the last step chose, whatever the host finds: a row each, no
noise, no beams. A run ends where a row does, or where somebody interrupts it, so that whoever
arrives waits for one step and not for the run. Until its kernel is built there are single steps.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from cluster.common.kernels.cpu.background import as_array
from cluster.common.model.dims import EMBED_TOKENS
from decoder_worker.cpu.coarse_head import LEAST_EXACT, CoarseHead
from decoder_worker.cpu.compiled import step_kernels
from decoder_worker.cpu.fused import FusedDecoder
from decoder_worker.cpu.fused_arrays import N_DIMS_IN_ROWS, OUTPUTS, PIECE, Layers, Pages
from decoder_worker.cpu.several.arrays import ENDED, Choice, Embedding, new_run, step_units
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.model import TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.tensors import DecoderTensors

MOST_STEPS = 32
RUN_S = 0.05  # of a run at most: between two, deadlines are looked at
STEPS_IN_REST = 2  # while the team's helpers rest, so that they are soon asked again


class SteppingDecoder(FusedDecoder):
    """A `FusedDecoder` that goes on by itself. For one thread, but for `interrupt`."""

    def __init__(
        self,
        tensors: DecoderTensors,
        reference: TorchDecoder,
        pools: tuple[Tensor, Tensor],
        team: StepTeam,
        layers: Layers,
        *,
        int8: bool,
        packed: bool,
    ) -> None:
        """Begin to build; arguments as in `FusedDecoder`. reference: whose embeddings it takes."""
        super().__init__(
            tensors, reference.embed, pools, team, int8=int8, packed=packed, layers=layers
        )
        positions = tensors.by_name["decoder.embed_positions.weight"]
        self._embedding = Embedding(as_array(tensors.by_name[EMBED_TOKENS]), as_array(positions))
        read = (layers.qkv.weight, self._own, self._cross, self._head.weight)
        weight, own, cross, head = (array.dtype.type for array in read)
        in_blocks = layers.qkv.weight.ndim > N_DIMS_IN_ROWS
        has_coarse = self._coarse is not None
        self._run_steps = step_kernels(
            weight, own, cross, head, layers.tiles, in_blocks, has_coarse
        )
        self._logits: Any = None
        self._interrupted = np.zeros(1, np.int64)
        self._step_s = RUN_S / 2

    def listen(self) -> None:
        """From now on `interrupt` ends a run."""
        self._interrupted[0] = 0

    def interrupt(self) -> None:
        """End the run with the step that it is in; from any thread."""
        self._interrupted[0] = 1

    def most_steps(self, n_rows: int) -> int:
        """How many steps of so many rows may be made at once, now; 1: it makes none."""
        has_kernels = self.takes(n_rows) and self.takes_logits(n_rows)
        if not has_kernels or self._run_steps.get() is None:
            return 1
        if self._team.rests:
            return STEPS_IN_REST
        return max(STEPS_IN_REST, min(MOST_STEPS, int(RUN_S / self._step_s)))

    def steps(
        self, index: Tensor, slots: SlotTable, rules: LogitRules, most: int
    ) -> tuple[Any, Any]:
        """Up to `most` steps of the rows that were planned, each fed by the one before.

        Args:
            index: int64 [n], the slots, in the order of the plan.
            most: no row may reach its limit before that step.

        Returns:
            Tokens int64 and log probabilities float32, [steps that were made, n].
        """
        run_steps, planned = self._run_steps.get(), self._planned
        assert run_steps is not None
        assert planned is not None
        own, cross = planned
        n, dims, coarse = len(index), self._dims, self._coarse_of(rules)
        memory = self._memory_for(n, int(max(own.n_pieces.max(), cross.n_pieces.max())))
        units = self._units(own, cross)
        n_words = None if coarse is None else rules.eot
        parts = step_units(units, dims.n_text_layer, n, dims.n_vocab, n_words)
        run = new_run(
            index.numpy(),
            min(most, _within_pieces(own)),
            self._logits_for(n),
            self._interrupted,
        )
        choice = Choice(
            slots.table.numpy(),
            rules.suppressed.numpy(),
            rules.never_or_not_first.numpy(),
            rules.begin.numpy(),
            rules.marks,
            rules.eot,
        )
        weights = (self._embedding, self._layers, self._head, coarse)
        job = partial(run_steps, *weights, own, cross, memory, units, parts, choice, run)
        begun = time.monotonic()
        self._team.run(job, len(run.tokens) * int(parts[2]))
        made = int(run.control[ENDED])
        self._step_s = (time.monotonic() - begun) / made
        return run.tokens[:made], run.logprobs[:made]

    def _coarse_of(self, rules: LogitRules) -> CoarseHead | None:
        """None where logits come from the head itself, as in `likely_logits`."""
        has_words = self._dims.n_vocab - rules.eot >= LEAST_EXACT
        return self._coarse if has_words and self._built.likely is not None else None

    def _units(self, own: Pages, cross: Pages) -> Any:
        """int64 [N_PHASES], of each phase of a layer."""
        qkv, self_out, cross_q, cross_out, fc1, fc2 = (
            products.bias.shape[1] // OUTPUTS for products in self._layers[:6]
        )
        n_own, n_cross = len(own.pieces), len(cross.pieces)
        units = [qkv, n_own, self_out, cross_q, n_cross, cross_out, fc1, fc2]
        return np.array(units, np.int64)

    def _logits_for(self, n_rows: int) -> Any:
        """float32 [n_rows, n_vocab], the same memory each time: new memory costs page faults."""
        if self._logits is None or len(self._logits) < n_rows:
            self._logits = np.empty((n_rows, self._dims.n_vocab), np.float32)
        return self._logits[:n_rows]


def _within_pieces(own: Pages) -> int:
    """Steps, the first one counted, after which each row still has as many pieces and pages."""
    last = own.last[:, 1]
    room = np.minimum(PIECE - last % PIECE, own.pool.shape[3] - last)
    return int(room.min())
