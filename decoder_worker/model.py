"""Whisper's text decoder over paged attention: ids and positions in, states and logits out.

Rows are tokens of any sequences, in any stage; which rows belong together only the attention
backend knows, from its plan. Cross-attention has queries only: its keys and values were projected
by the encoder worker and lie in pages. Plain frozen weights, every size from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model.checkpoint import Checkpoint
from cluster.model.layers import MLP, LayerNorm, load_qkv, stream_dtype
from cluster.model.linear import Linear, Pack, Projection, packer
from cluster.model.shapes import EMBED_TOKENS, decoder_shapes
from cluster.model.weights import load_tensors, output_projection
from decoder_worker.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Self-attention, cross-attention, feed-forward, each behind its norm and with a residual."""

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
class TextDecoder:
    """embed_tokens [n_vocab, n_text_state]; embed_positions [n_text_ctx, n_text_state].

    projection: what turns states into logits, the token embedding itself where they are tied.
    """

    n_head: int
    embed_tokens: Tensor
    embed_positions: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: LayerNorm
    projection: Projection

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        int8: bool = False,
    ) -> TextDecoder:
        """Read the decoder's tensors of a checkpoint, no others.

        int8: hold the weights of matrix products in 8 bits (CPU).

        Raises:
            CheckpointError: a tensor is missing or has another shape than config.json says.
        """
        dims = checkpoint.dims
        projection = output_projection(checkpoint)
        shapes = decoder_shapes(dims) | {projection: (dims.n_vocab, dims.n_text_state)}
        tensors = load_tensors(checkpoint, shapes, dtype, device)
        stream = stream_dtype(device, dtype)
        head = load_tensors(checkpoint, {projection: shapes[projection]}, stream, device)
        pack = packer(device, dtype, int8=int8)
        pack_head = packer(device, stream, int8=int8)
        return cls(
            n_head=dims.n_text_head,
            embed_tokens=tensors[EMBED_TOKENS],
            embed_positions=tensors["decoder.embed_positions.weight"],
            layers=tuple(DecoderLayer.load(tensors, i, pack) for i in range(dims.n_text_layer)),
            norm=LayerNorm.load(tensors, "decoder.layer_norm"),
            projection=pack_head(Linear(head[projection], None)),
        )

    def __call__(self, tokens: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Run rows through all layers; `attention` was planned for exactly these rows.

        Args:
            tokens, positions: int64 [n_tokens], on the weights' device.

        Returns:
            Normed states [n_tokens, n_text_state], in the residual stream's dtype.
        """
        x = self.embed_tokens[tokens] + self.embed_positions[positions]
        x = x.to(self.norm.weight.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, self.n_head, attention)
        return self.norm.unrounded(x)

    def logits(self, states: Tensor) -> Tensor:
        """states [n, n_text_state] -> float32 [n, n_vocab]."""
        return self.projection(states).float()
