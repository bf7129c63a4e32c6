"""Whisper's text decoder over paged attention: token ids and positions in, states and logits out.

`TextDecoder` is the interface, `TorchDecoder` the reference. Rows are tokens of any sequences; only
the planned batch tells which belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import EMBED_TOKENS, ModelDims, decoder_shapes
from cluster.common.model.kv_scales import KVScales
from cluster.common.model.layers import (
    MLP,
    LayerNorm,
    Linear,
    Pack,
    Projection,
    load_qkv,
    packer,
    stream_dtype,
)
from cluster.common.model.weights import load_tensors, output_projection
from decoder_worker.attention.base import AttentionBackend, AttentionBatch


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """by_name: all but the head, by Hugging Face's names. head: [n_vocab, n_text_state]."""

    dims: ModelDims
    dtype: torch.dtype
    by_name: Mapping[str, Tensor]
    head: Tensor  # in the residual stream's dtype

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
    ) -> DecoderTensors:
        """Read the decoder's tensors or raise CheckpointError. scales: of 8-bit cross-KV."""
        dims, name = checkpoint.dims, output_projection(checkpoint)
        kept = stream_dtype(device, dtype)
        head = load_tensors(checkpoint, {name: (dims.n_vocab, dims.n_text_state)}, kept, device)
        by_name = load_tensors(checkpoint, decoder_shapes(dims), dtype, device)
        if scales is not None:
            by_name = scales.grow(by_name)
        return cls(dims, dtype, by_name, head[name])


class TextDecoder(Protocol):
    """One checkpoint's decoder over one pair of page pools."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one forward. Only this reads host data, so that the rest can be captured."""

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the planned rows through all layers; writes their keys and values to the self pool.

        tokens, positions: int64 [n_tokens], on the weights' device. Returns normed states
        [n_tokens, n_text_state] in the residual stream's dtype.
        """

    def logits(self, states: Tensor) -> Tensor:
        """states [n, n_text_state] -> float32 [n, n_vocab]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Self-attention, cross-attention and feed-forward, each normed first and with a residual."""

    self_norm: LayerNorm
    self_qkv: Projection
    self_out: Projection
    cross_norm: LayerNorm
    cross_q: Projection
    cross_out: Projection
    mlp: MLP

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], layer: int, pack: Pack) -> DecoderLayer:
        prefix = f"decoder.layers.{layer}"
        return cls(
            self_norm=LayerNorm.load(tensors, f"{prefix}.self_attn_layer_norm"),
            self_qkv=load_qkv(tensors, f"{prefix}.self_attn", pack),
            self_out=pack(Linear.load(tensors, f"{prefix}.self_attn.out_proj")),
            cross_norm=LayerNorm.load(tensors, f"{prefix}.encoder_attn_layer_norm"),
            cross_q=pack(Linear.load(tensors, f"{prefix}.encoder_attn.q_proj")),
            cross_out=pack(Linear.load(tensors, f"{prefix}.encoder_attn.out_proj")),
            mlp=MLP.load(tensors, prefix, pack),
        )

    def __call__(self, layer: int, x: Tensor, n_head: int, attention: AttentionBackend) -> Tensor:
        """x [n_tokens, n_text_state] -> the same shape."""
        q, k, v = self.self_qkv(self.self_norm(x)).view(len(x), 3, n_head, -1).unbind(1)
        x = self.self_out.add_to(x, attention.self_attention(layer, q, k, v).flatten(1))
        q = self.cross_q(self.cross_norm(x)).view(len(x), n_head, -1)
        x = self.cross_out.add_to(x, attention.cross_attention(layer, q).flatten(1))
        return self.mlp(x)


@dataclass(frozen=True, slots=True)
class WideHead:
    """Logits from a weight [n_vocab, n_text_state] of 16 bits, as sums that stay float32."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, n_text_state], rounded to the weight's dtype -> float32 [n, n_vocab]."""
        x = x.to(self.weight.dtype)
        if x.device.type == "cpu":  # torch has this product for other devices alone
            return x.float() @ self.weight.float().t()
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class TorchDecoder:
    """Implements `TextDecoder` by torch's operations, over one attention backend."""

    n_head: int
    embed_tokens: Tensor
    embed_positions: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: LayerNorm
    head: Callable[[Tensor], Tensor]
    attention: AttentionBackend

    @classmethod
    def of(
        cls,
        tensors: DecoderTensors,
        attention: AttentionBackend,
        *,
        int8: bool = False,
        int8_head: bool = False,
        layers: tuple[DecoderLayer, ...] | None = None,
    ) -> TorchDecoder:
        """int8: hold the weights of products in 8 bits (CPU); int8_head: only the head's.

        layers: those of the caller; None: loaded here, in this device's best layout.
        """
        by_name, head = tensors.by_name, tensors.head
        if layers is None:
            pack = packer(head.device, tensors.dtype, int8=int8)
            indices = range(tensors.dims.n_text_layer)
            layers = tuple(DecoderLayer.load(by_name, index, pack) for index in indices)
        return cls(
            n_head=tensors.dims.n_text_head,
            embed_tokens=by_name[EMBED_TOKENS],
            embed_positions=by_name["decoder.embed_positions.weight"],
            layers=layers,
            norm=LayerNorm.load(by_name, "decoder.layer_norm"),
            head=_head(head, int8=int8 or int8_head),
            attention=attention,
        )

    def over(self, attention: AttentionBackend) -> TorchDecoder:
        return replace(self, attention=attention)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens[tokens] + self.embed_positions[positions]
        return x.to(self.norm.weight.dtype)

    def plan(self, batch: AttentionBatch) -> None:
        self.attention.plan(batch)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.attention.begin(positions)
        x = self.embed(tokens, positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, self.n_head, self.attention)
        return self.norm.unrounded(x)

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states).float()


def _head(weight: Tensor, *, int8: bool) -> Callable[[Tensor], Tensor]:
    if weight.dtype == torch.float32:
        return packer(weight.device, weight.dtype, int8=int8)(Linear(weight, None))
    return WideHead(weight)
