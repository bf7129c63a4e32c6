"""Reads what a checkpoint holds of a decoder; every way to compute the decoder is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import ModelDims, decoder_shapes
from cluster.common.model.kv_scales import KVScales
from cluster.common.model.layers import stream_dtype
from cluster.common.model.weights import load_tensors, output_projection


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """Tensors on one device.

    by_name: all tensors but the head's, by Hugging Face's names.
    head: [n_vocab, n_text_state], what turns states into logits; the token embedding itself where
        the two are tied.
    """

    dims: ModelDims
    dtype: torch.dtype
    by_name: Mapping[str, Tensor]
    head: Tensor

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        head_dtype: torch.dtype | None = None,
        scales: KVScales | None = None,
    ) -> DecoderTensors:
        """Read the decoder's tensors of a checkpoint, no others.

        Args:
            head_dtype: None takes the residual stream's.
            scales: of the cross-attention KV in its pool, where that is of 8 bits.

        Raises:
            CheckpointError: a tensor is missing or has another shape than config.json says.
        """
        dims, name = checkpoint.dims, output_projection(checkpoint)
        kept = stream_dtype(device, dtype) if head_dtype is None else head_dtype
        head = load_tensors(checkpoint, {name: (dims.n_vocab, dims.n_text_state)}, kept, device)
        by_name = load_tensors(checkpoint, decoder_shapes(dims), dtype, device)
        if scales is not None:
            by_name = scales.grow(by_name)
        return cls(dims, dtype, by_name, head[name])
