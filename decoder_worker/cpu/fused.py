"""Decoder forwards of a few rows by `fused_kernels`, shared out over a team of threads.

The layers are those of `decoder_worker.model`, whose classes are the reference and do what this
does not: many rows, odd shapes, all until the kernels are built. Beside torch's weights this holds
a plain copy of them. Bound to the two page pools of an engine; for that engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.jit.background import InBackground, as_array
from cluster.model.dims import ModelDims
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.cpu.fused_arrays import (
    HEAD_DIM,
    OUTPUTS,
    PIECE,
    Memory,
    Pages,
    n_head_units,
    n_units,
    new_memory,
    plain_head,
    stack_layers,
)
from decoder_worker.cpu.sources import KERNEL_SOURCES
from decoder_worker.cpu.step_team import StepTeam

if TYPE_CHECKING:
    from decoder_worker.cpu.fused_kernels import FusedKernels

MAX_ROWS = 8  # above it torch's products are faster


def fits_layers(dims: ModelDims) -> bool:
    """Whether units of `OUTPUTS` outputs make up every product of a layer."""
    return dims.n_text_state % OUTPUTS == 0 and dims.n_text_ffn % OUTPUTS == 0


class FusedDecoder:
    """Layers and head over a self pool and a cross pool, [page, L, 2, page_size, H, 64] both."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        head: Tensor,
        dims: ModelDims,
        pools: tuple[Tensor, Tensor],
        n_threads: int,
        *,
        int8: bool,
    ) -> None:
        """Begin to build.

        Args:
            tensors: the decoder's, by Hugging Face's names.
            head: [n_vocab, d], float32 or float16.
            n_threads: that share a forward out, the calling one among them.
            int8: hold the weights in 8 bits.
        """
        self._dims = dims
        self._own, self._cross = (as_array(pool) for pool in pools)
        self._layers = stack_layers(tensors, dims, int8=int8)
        self._head = plain_head(head, int8=int8)
        self._team = StepTeam(n_threads - 1)
        self._memory: Memory | None = None
        read = (self._layers.qkv.weight, self._own, self._cross, self._head.weight)
        dtypes = [array.dtype.type for array in read]
        self._kernels = InBackground("decoder layers", partial(_build, *dtypes), KERNEL_SOURCES)

    def wait(self, timeout_s: float) -> bool:
        """Whether the kernels are there, after at most `timeout_s`."""
        return self._kernels.wait(timeout_s) is not None

    def takes(self, n_rows: int) -> bool:
        """Whether forwards of so many rows are for this, now."""
        return n_rows <= MAX_ROWS and self._kernels.get() is not None

    def states(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        """Embedded rows, float32 [n, d] -> normed states, the same. Writes to the self pool."""
        own = self._pages(batch.self_kv, self._own, causal=True)
        cross = self._pages(batch.cross_kv, self._cross, causal=False)
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
        """states float32 [n, d] -> float32 [n, n_vocab]."""
        out = torch.empty(len(states), self._dims.n_vocab)
        job = partial(self._built.head, as_array(states.contiguous()), self._head, as_array(out))
        self._team.run(job, n_head_units(self._dims.n_vocab))
        return out

    @property
    def _built(self) -> FusedKernels:
        kernels = self._kernels.get()
        assert kernels is not None, "ask `takes` first"
        return kernels

    def _pages(self, kv: PagedKV, pool: Any, *, causal: bool) -> Pages:
        page_size, n_rows = pool.shape[3], int(kv.qo_indptr[-1])
        most = -(-page_size // PIECE) * len(kv.kv_indices) * (n_rows if causal else 1)
        pieces = np.empty((most, 6), np.int32)
        n_pieces, last = np.empty(n_rows, np.int32), np.empty((n_rows, 2), np.int32)
        indices = (kv.qo_indptr, kv.kv_indptr, kv.kv_indices, kv.kv_last_page_len)
        n = self._built.cut(
            *(index.numpy() for index in indices), page_size, causal, pieces, n_pieces, last
        )
        return Pages(pool, pieces[:n], n_pieces, last)

    def _memory_for(self, n_rows: int, most_pieces: int) -> Memory:
        """For all forwards until one needs more pieces."""
        if self._memory is None or self._memory.highest.shape[1] < most_pieces:
            dims, d = self._dims, self._dims.n_text_state
            n_head = d // HEAD_DIM
            self._memory = new_memory(MAX_ROWS, most_pieces, n_head, d, dims.n_text_ffn)
        return Memory._make(array[:n_rows] for array in self._memory)


def _build(*dtypes: Any) -> FusedKernels:
    from decoder_worker.cpu.fused_kernels import build

    return build(*dtypes)
