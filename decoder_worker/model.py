"""Whisper's text decoder over paged attention: ids and positions in, states and logits out.

Rows are tokens of any sequences, in any stage; which rows belong together only the attention
backend knows, from its plan. Cross-attention has queries only: its keys and values were projected
by the encoder worker and lie in pages. Plain frozen weights, every size from the checkpoint.

On a CPU the same runs with fewer passes over the rows, once `step_kernels` are built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cluster.jit.background import InBackground, as_array
from cluster.model.checkpoint import Checkpoint
from cluster.model.layers import MLP, LayerNorm, load_qkv, stream_dtype
from cluster.model.linear import Linear, Pack, Projection, packer
from cluster.model.shapes import EMBED_TOKENS, decoder_shapes
from cluster.model.weights import load_tensors, output_projection
from decoder_worker.attention.base import AttentionBackend
from decoder_worker.cpu.attention import CpuAttention, fits_kernels
from decoder_worker.cpu.fused import FusedDecoder, fits_layers
from decoder_worker.cpu.sources import KERNEL_SOURCES

if TYPE_CHECKING:
    from decoder_worker.cpu.step_kernels import StepKernels

FALLBACK_ROWS = 4096  # of the vocabulary at a time, while there are no kernels


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
class HalfHead:
    """Logits of a CPU that computes in bfloat16: sums in float32 over weights in float16.

    Half of what float32 reads, and float16 keeps of these weights 8 times more than bfloat16.
    weight float16 [n_vocab, n_text_state].
    """

    weight: Tensor
    kernels: InBackground[StepKernels]

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [n, n_text_state] -> float32 [n, n_vocab]."""
        if kernels := self.kernels.get():
            out = torch.empty(len(x), len(self.weight))
            bits = self.weight.view(torch.uint16).numpy()
            kernels.logits(as_array(x.contiguous()), bits, as_array(out))
            return out
        begins = range(0, len(self.weight), FALLBACK_ROWS)
        parts = (self.weight[begin : begin + FALLBACK_ROWS].float() for begin in begins)
        return torch.cat([x @ part.t() for part in parts], 1)


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """embed_tokens [n_vocab, n_text_state]; embed_positions [n_text_ctx, n_text_state].

    head: what turns states into logits, the token embedding itself where they are tied.
    kernels: of a CPU; None on a GPU. fused: of a CPU and two pools, for few rows.
    """

    n_head: int
    embed_tokens: Tensor
    embed_positions: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: LayerNorm
    head: Callable[[Tensor], Tensor]
    kernels: InBackground[StepKernels] | None
    fused: FusedDecoder | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        int8: bool = False,
        pools: tuple[Tensor, Tensor] | None = None,
        threads: int = 1,
    ) -> TextDecoder:
        """Read the decoder's tensors of a checkpoint, no others.

        Args:
            int8: hold the weights of matrix products in 8 bits (CPU).
            pools: of self- and cross-attention, whose forwards of few rows `threads` threads are
                to share out (CPU).

        Raises:
            CheckpointError: a tensor is missing or has another shape than config.json says.
        """
        dims = checkpoint.dims
        shapes = decoder_shapes(dims)
        tensors = load_tensors(checkpoint, shapes, dtype, device)
        pack = packer(device, dtype, int8=int8)
        kernels = fused = None
        if torch.device(device).type == "cpu":
            kernels = InBackground("decoder step", partial(_build_kernels, dtype), KERNEL_SOURCES)
        weight = _head_weight(checkpoint, dtype, device, halves=kernels is not None and not int8)
        if pools is not None and fits_kernels(*pools) and fits_layers(dims):
            fused = FusedDecoder(tensors, weight, dims, pools, threads, int8=int8)
        return cls(
            n_head=dims.n_text_head,
            embed_tokens=tensors[EMBED_TOKENS],
            embed_positions=tensors["decoder.embed_positions.weight"],
            layers=tuple(DecoderLayer.load(tensors, i, pack) for i in range(dims.n_text_layer)),
            norm=LayerNorm.load(tensors, "decoder.layer_norm"),
            head=_head(weight, kernels, int8=int8),
            kernels=kernels,
            fused=fused,
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
        if isinstance(attention, CpuAttention) and self.fused and self.fused.takes(len(x)):
            return self.fused.states(x, attention.batch)
        if self.kernels is not None and (kernels := self.kernels.get()):
            return self._run(x, attention, kernels)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, self.n_head, attention)
        return self.norm.unrounded(x)

    def logits(self, states: Tensor) -> Tensor:
        """states [n, n_text_state] -> float32 [n, n_vocab]."""
        if self.fused is not None and self.fused.takes(len(states)):
            return self.fused.logits(states)
        return self.head(states).float()

    def _run(self, x: Tensor, attention: AttentionBackend, kernels: StepKernels) -> Tensor:
        """The layers over embedded rows x, float32 [n_tokens, n_text_state], which it changes."""
        stream, n, n_head = as_array(x), len(x), self.n_head
        normed = self.layers[0].self_norm(x)
        rows = as_array(normed)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.self_qkv(normed).view(n, 3, n_head, -1).unbind(1)
            delta = layer.self_out(attention.self_attention(index, q, k, v).flatten(1))
            kernels.add_norm(stream, as_array(delta), *layer.cross_norm.arrays, rows)
            q = layer.cross_q(normed).view(n, n_head, -1)
            delta = layer.cross_out(attention.cross_attention(index, q).flatten(1))
            kernels.add_norm(stream, as_array(delta), *layer.mlp.norm.arrays, rows)
            delta = layer.mlp.fc2(layer.mlp.fc1.gelu(normed))
            if index + 1 < len(self.layers):
                norm = self.layers[index + 1].self_norm
            else:
                norm, rows = self.norm, as_array(normed := torch.empty_like(x))
            kernels.add_norm(stream, as_array(delta), *norm.arrays, rows)
        return normed


def _head_weight(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str, *, halves: bool
) -> Tensor:
    """halves: a model that computes in bfloat16 is to have it in float16; see `HalfHead`."""
    name = output_projection(checkpoint)
    shape = (checkpoint.dims.n_vocab, checkpoint.dims.n_text_state)
    kept = stream_dtype(device, dtype)
    if halves and dtype == torch.bfloat16:
        kept = torch.float16
    return load_tensors(checkpoint, {name: shape}, kept, device)[name]


def _head(
    weight: Tensor, kernels: InBackground[StepKernels] | None, *, int8: bool
) -> Callable[[Tensor], Tensor]:
    if weight.dtype == torch.float16 and kernels is not None:
        return HalfHead(weight, kernels)
    return packer(weight.device, weight.dtype, int8=int8)(Linear(weight, None))


def _build_kernels(dtype: torch.dtype) -> StepKernels:
    from decoder_worker.cpu.step_kernels import build

    return build(np.uint16 if dtype == torch.bfloat16 else np.float32)
