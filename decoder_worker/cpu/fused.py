"""A CPU's decoder: few rows run as one compiled program, all else by torch.

Greedy rows can take several steps at once; such a run ends when a row ends or a thread interrupts
it, so that an arrival waits for one step. For one engine and its thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.machine_code import as_array
from cluster.common.kernels.cpu.tile_registers import VECTORS
from cluster.common.model.dims import ModelDims
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.cpu.arrays import (
    ENDED,
    HEAD_DIM,
    N_DIMS_IN_ROWS,
    OUTPUTS,
    PIECE,
    Choice,
    Embedding,
    Head,
    Kinds,
    Layers,
    Memory,
    Pages,
    n_head_units,
    n_units,
    new_memory,
    new_run,
    step_units,
)
from decoder_worker.cpu.compiled import decoder_kernels
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.model import TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.slots import SlotTable

if TYPE_CHECKING:
    from decoder_worker.cpu.step_kernels import DecoderKernels

MAX_ROWS = 64
# Without tiles, torch's products and attention are faster for longer prompts of an entry, and its
# product with the head for more rows.
FEW_QUERIES = 8
FEW_LOGITS = 16
DTYPES = (torch.float32, torch.bfloat16)
CROSS_DTYPES = (*DTYPES, torch.float8_e4m3fn)
MOST_STEPS = 32
RUN_S = 0.05  # of a run at most: deadlines are looked at between runs
STEPS_IN_REST = 2  # while the team's helpers rest, so that they are soon asked again


def fits_layers(dims: ModelDims) -> bool:
    return dims.n_text_state % OUTPUTS == 0 and dims.n_text_ffn % OUTPUTS == 0


def fits_pools(self_pool: Tensor, cross_pool: Tensor) -> bool:
    pools = (self_pool, cross_pool)
    on_cpu = all(pool.device.type == "cpu" for pool in pools)
    have_dtypes = self_pool.dtype in DTYPES and cross_pool.dtype in CROSS_DTYPES
    return on_cpu and have_dtypes and all(pool.shape[-1] == HEAD_DIM for pool in pools)


class FusedDecoder:
    """Implements `TextDecoder`. For one thread, except `interrupt`."""

    def __init__(
        self,
        dims: ModelDims,
        reference: TorchDecoder,
        pools: tuple[Tensor, Tensor],
        team: StepTeam,
        layers: Layers,
        head: Head,
        *,
        packed: bool = False,
    ) -> None:
        """layers, head: the weights of `reference`, which is over these pools, as `packed` says."""
        self._dims = dims
        self._reference = reference
        self._own, self._cross = (as_array(pool) for pool in pools)
        self._layers, self._head = layers, head
        self._embedding = Embedding(
            as_array(reference.embed_tokens), as_array(reference.embed_positions)
        )
        tiles = layers.tiles
        self._most_queries = FEW_QUERIES if tiles is None or tiles is VECTORS else MAX_ROWS
        self._most_logit_rows = FEW_LOGITS if head.tiles is None else sys.maxsize
        self._team = team
        self._packed = packed
        self._memory: Memory | None = None
        self._planned: tuple[Pages, Pages] | None = None  # None: the reference computes this one
        self._logits: Any = None
        self._interrupted = np.zeros(1, np.int64)
        self._step_s = RUN_S / 2
        read = (layers.qkv.weight, self._own, self._cross, head.weight)
        weight, own, cross, of_head = (array.dtype.type for array in read)
        in_blocks = layers.qkv.weight.ndim > N_DIMS_IN_ROWS
        kinds = Kinds(weight, own, cross, of_head, tiles, in_blocks, head.tiles)
        self._kernels = decoder_kernels(kinds)

    def takes(self, n_rows: int) -> bool:
        return n_rows <= MAX_ROWS and self._kernels is not None

    def forwards(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group prompts of these lengths so that the result of none depends on its group.

        Torch's results depend on the number of rows, and in 8 bits differ from the program's: so
        long prompts run alone by torch, others together as far as the program takes them.
        """
        few = [i for i, n in enumerate(lengths) if n <= self._most_queries]
        each = [[i] for i, n in enumerate(lengths) if n > self._most_queries]
        together: list[int] = []
        for i in few:
            n_tokens = sum(lengths[other] for other in together) + lengths[i]
            if not together or n_tokens > MAX_ROWS or 2 * len(together) + 2 > self._most_logit_rows:
                each.append(together := [])
            together.append(i)
        return each

    def plan(self, batch: AttentionBatch) -> None:
        few = batch.self_kv.most_queries <= self._most_queries
        if not (few and self.takes(batch.n_rows)):
            self._planned = None
            self._reference.plan(batch)
            return
        cut = self._built.cut
        self._planned = (
            cut_pages(cut, batch.self_kv, self._own, causal=True),
            cut_pages(cut, batch.cross_kv, self._cross, causal=False, packed=self._packed),
        )

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self._planned is None:
            return self._reference.states(tokens, positions)
        own, cross = self._planned
        memory, units = self._room(len(tokens), own, cross)
        memory.x[:] = as_array(self._reference.embed(tokens, positions))
        self._team.run(
            partial(self._built.layers, self._layers, own, cross, memory, units),
            n_units(units, self._dims.n_text_layer),
        )
        return torch.from_numpy(memory.normed.copy())

    def logits(self, states: Tensor) -> Tensor:
        if len(states) > self._most_logit_rows or self._kernels is None:
            return self._reference.logits(states)
        out = torch.empty(len(states), self._dims.n_vocab)
        job = partial(self._built.head, as_array(states.contiguous()), self._head, as_array(out))
        self._team.run(job, n_head_units(self._dims.n_vocab))
        return out

    def listen(self) -> None:
        """Forget earlier interrupts."""
        self._interrupted[0] = 0

    def interrupt(self) -> None:
        """End the run with its current step; from any thread."""
        self._interrupted[0] = 1

    def most_steps(self, n_rows: int) -> int:
        """How many steps of so many rows to run at once now; 1 where more gain nothing."""
        if not self.takes(n_rows):
            return 1
        if self._team.rests:
            return STEPS_IN_REST
        return max(STEPS_IN_REST, min(MOST_STEPS, int(RUN_S / self._step_s)))

    def steps(
        self, index: Tensor, slots: SlotTable, rules: LogitRules, most: int
    ) -> tuple[Tensor, Tensor]:
        """Run up to `most` steps of the planned rows, each fed by the one before.

        index: int64 [n], the slots, in the order of the plan; `takes(n)` must hold. most: no row
        may reach its limit before that step. Returns tokens int64 and log probabilities float32,
        [steps made, n].
        """
        assert self._planned is not None
        own, cross = self._planned
        n, dims = len(index), self._dims
        memory, units = self._room(n, own, cross)
        parts = step_units(units, dims.n_text_layer, n, dims.n_vocab)
        if self._logits is None or len(self._logits) < n:  # kept: new memory costs page faults
            self._logits = np.empty((n, dims.n_vocab), np.float32)
        most = min(most, _within_pieces(own))
        run = new_run(index.numpy(), most, self._logits[:n], self._interrupted)
        choice = Choice(
            slots.table.numpy(),
            rules.suppressed.numpy(),
            rules.begin.numpy(),
            rules.marks,
        )
        weights = (self._embedding, self._layers, self._head)
        job = partial(self._built.steps, *weights, own, cross, memory, units, parts, choice, run)
        begun = time.monotonic()
        self._team.run(job, most * int(parts[2]))
        made = int(run.control[ENDED])
        self._step_s = (time.monotonic() - begun) / made
        return torch.from_numpy(run.tokens[:made]), torch.from_numpy(run.logprobs[:made])

    @property
    def _built(self) -> DecoderKernels:
        assert self._kernels is not None, "ask `takes` first"
        return self._kernels

    def _room(self, n_rows: int, own: Pages, cross: Pages) -> tuple[Memory, Any]:
        """Memory for a forward, kept for later ones, and a layer's units, int64 [N_PHASES]."""
        most_pieces = int(max(own.n_pieces.max(), cross.n_pieces.max()))
        if self._memory is None or self._memory.highest.shape[1] < most_pieces:
            dims, d = self._dims, self._dims.n_text_state
            n_head = d // HEAD_DIM
            self._memory = new_memory(MAX_ROWS, most_pieces, n_head, d, dims.n_text_ffn)
        qkv, self_out, cross_q, cross_out, fc1, fc2 = (
            products.bias.shape[1] // OUTPUTS for products in self._layers[:6]
        )
        attend = (len(own.pieces), len(cross.pieces))
        units = [qkv, attend[0], self_out, cross_q, attend[1], cross_out, fc1, fc2]
        return Memory._make(array[:n_rows] for array in self._memory), np.array(units, np.int64)


def cut_pages(
    cut: Callable[..., int], kv: PagedKV, pool: Any, *, causal: bool, packed: bool = False
) -> Pages:
    page_size, n_rows = pool.shape[3], kv.n_rows
    most = -(-page_size // PIECE) * len(kv.kv_indices) * (n_rows if causal else 1)
    pieces = np.empty((most, 7), np.int32)
    n_pieces, last = np.empty(n_rows, np.int32), np.empty((n_rows, 2), np.int32)
    indices = (kv.qo_indptr, kv.kv_indptr, kv.kv_indices, kv.kv_last_page_len)
    arrays = (index.numpy() for index in indices)
    n = cut(*arrays, page_size, causal, packed, pieces, n_pieces, last)
    return Pages(pool, pieces[:n], n_pieces, last)


def _within_pieces(own: Pages) -> int:
    """Steps, including the next one, in which no row begins a piece or a page."""
    last = own.last[:, 1]
    room = np.minimum(PIECE - last % PIECE, own.pool.shape[3] - last)
    return int(room.min())
