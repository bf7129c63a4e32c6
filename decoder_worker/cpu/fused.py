"""The decoder's whole forward over a few rows by `fused_kernels`, on a team of threads.

`decoder_worker.model.TorchDecoder` is the reference, and does what this does not: many rows, odd
shapes, and all until the kernels are built. Beside torch's weights this holds a plain copy of them,
which torch shares where the model is large (`decoder_worker.tensors`). Bound to the two page
pools of an engine; for that engine's thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.background import as_array
from cluster.common.model.dims import ModelDims
from decoder_worker.attention.base import AttentionBatch
from decoder_worker.cpu.attention import cut_pages
from decoder_worker.cpu.coarse_head import LEAST_EXACT, CoarseHead, coarse_head, fits_coarse
from decoder_worker.cpu.compiled import layer_kernels
from decoder_worker.cpu.fused_arrays import (
    HEAD_DIM,
    N_DIMS_IN_ROWS,
    OUTPUTS,
    Layers,
    Memory,
    Pages,
    n_head_units,
    n_likely_units,
    n_units,
    new_memory,
    plain_head,
    stack_layers,
)
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.tensors import DecoderTensors

if TYPE_CHECKING:
    from decoder_worker.cpu.fused_kernels import FusedKernels

MAX_ROWS = 8  # above it torch's products are faster
MAX_ROWS_IN_TILES = 64  # the same where the CPU multiplies in tiles


def fits_layers(dims: ModelDims) -> bool:
    """Whether units of `OUTPUTS` outputs make up every product of a layer."""
    return dims.n_text_state % OUTPUTS == 0 and dims.n_text_ffn % OUTPUTS == 0


class FusedDecoder:
    """Implements `TextDecoder` over a self pool and a cross pool.

    Both are [page, L, 2, page_size, H, HEAD_DIM].
    """

    def __init__(
        self,
        tensors: DecoderTensors,
        embed: Callable[[Tensor, Tensor], Tensor],
        pools: tuple[Tensor, Tensor],
        team: StepTeam,
        *,
        int8: bool,
        packed: bool = False,
        layers: Layers | None = None,
    ) -> None:
        """Begin to build.

        Args:
            tensors: of a CPU; the head in float32 or in 16 bits.
            embed: from tokens and positions to the first layer's rows, float32 [n, d].
            team: its threads share a forward out.
            int8: hold the weights in 8 bits.
            packed: as in `TorchAttention`.
            layers: the tensors' weights, where the caller has stacked them already. Where these
                are for tiles, so is the head, which is then bfloat16 or in 8 bits.
        """
        self._dims = tensors.dims
        self._embed = embed
        self._own, self._cross = (as_array(pool) for pool in pools)
        self._layers = layers or stack_layers(tensors.by_name, tensors.dims, int8=int8)
        tiles = self._layers.tiles
        self._head = plain_head(tensors.head, int8=int8, tiles=tiles)
        has_16_bits = self._head.weight.dtype.itemsize == 2
        self._coarse: CoarseHead | None = None
        if has_16_bits and fits_coarse(tensors.dims):
            self._coarse = coarse_head(tensors.head, tiles)
        self._most_rows = MAX_ROWS if tiles is None else MAX_ROWS_IN_TILES
        # Torch has no product of float32 rows over 16 bits: it would convert the weights each time.
        any_rows = has_16_bits or tiles is not None
        self._most_logit_rows = sys.maxsize if any_rows else MAX_ROWS
        self._team = team
        self._packed = packed
        self._memory: Memory | None = None
        self._planned: tuple[Pages, Pages] | None = None
        read = (self._layers.qkv.weight, self._own, self._cross, self._head.weight)
        weight, own, cross, head = (array.dtype.type for array in read)
        in_blocks = self._layers.qkv.weight.ndim > N_DIMS_IN_ROWS
        self._kernels = layer_kernels(weight, own, cross, head, tiles, in_blocks)

    def takes(self, n_rows: int) -> bool:
        """Whether forwards of so many rows are for this, now."""
        return n_rows <= self._most_rows and self._kernels.get() is not None

    def takes_logits(self, n_rows: int) -> bool:
        """Whether the logits of so many rows are for this, now."""
        return n_rows <= self._most_logit_rows and self._kernels.get() is not None

    def plan(self, batch: AttentionBatch) -> None:
        cut = self._built.cut
        self._planned = (
            cut_pages(cut, batch.self_kv, self._own, causal=True),
            cut_pages(cut, batch.cross_kv, self._cross, causal=False, packed=self._packed),
        )

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self._planned is not None
        own, cross = self._planned
        x = self._embed(tokens, positions)
        memory = self._memory_for(len(x), int(max(own.n_pieces.max(), cross.n_pieces.max())))
        memory.x[:] = as_array(x)
        products = (self._layers[i].bias.shape[1] // OUTPUTS for i in range(6))
        qkv, self_out, cross_q, cross_out, fc1, fc2 = products
        attend = (len(own.pieces), len(cross.pieces))
        units = np.array(
            [qkv, attend[0], self_out, cross_q, attend[1], cross_out, fc1, fc2], np.int64
        )
        self._team.run(
            partial(self._built.layers, self._layers, own, cross, memory, units),
            n_units(units, self._dims.n_text_layer),
        )
        return torch.from_numpy(memory.normed.copy())

    def logits(self, states: Tensor) -> Tensor:
        out = torch.empty(len(states), self._dims.n_vocab)
        job = partial(self._built.head, as_array(states.contiguous()), self._head, as_array(out))
        self._team.run(job, n_head_units(self._dims.n_vocab))
        return out

    def likely_logits(self, states: Tensor, rules: LogitRules, first: int = 0) -> Tensor:
        likely, coarse = self._built.likely, self._coarse
        n, n_vocab, n_words = len(states), self._dims.n_vocab, rules.eot
        if likely is None or coarse is None or n_vocab - n_words < LEAST_EXACT:
            return self.logits(states)
        out = torch.empty(n, n_vocab)
        read = (as_array(states.contiguous()), self._head, coarse)
        masks = (as_array(rules.never_or_not_first), as_array(rules.begin))
        self._team.run(
            partial(likely, *read, *masks, n_words, first, as_array(out)),
            n_likely_units(n - first, n_vocab, n_words),
        )
        return out

    @property
    def _built(self) -> FusedKernels:
        kernels = self._kernels.get()
        assert kernels is not None, "ask `takes` first"
        return kernels

    def _memory_for(self, n_rows: int, most_pieces: int) -> Memory:
        """For all forwards until one needs more pieces."""
        if self._memory is None or self._memory.highest.shape[1] < most_pieces:
            dims, d = self._dims, self._dims.n_text_state
            n_head = d // HEAD_DIM
            self._memory = new_memory(self._most_rows, most_pieces, n_head, d, dims.n_text_ffn)
        return Memory._make(array[:n_rows] for array in self._memory)
