"""Whisper's audio encoder on torch: log-mel features to encoder states.

Pre-norm transformer over 1500 positions; every shape comes from the checkpoint. Runs without
gradients. Knows nothing of batches, pages or decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.model.checkpoint import Checkpoint
from cluster.model.layers import MLP, LayerNorm, load_qkv
from cluster.model.linear import Linear, Pack, Projection, packer
from cluster.model.shapes import encoder_shapes
from cluster.model.weights import load_tensors
from encoder_worker.attention import Attention, make_attention


@dataclass(frozen=True, slots=True)
class Conv:
    """Convolution over time, width 3, with its activation: weight [n_out, n_in, 3]."""

    weight: Tensor
    bias: Tensor
    stride: int

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str, stride: int) -> Conv:
        return cls(tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"], stride)

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, n_in, T] -> [B, n_out, T / stride]."""
        return F.gelu(F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Self-attention over all positions, then the MLP; both add to the residual stream."""

    n_head: int
    norm: LayerNorm
    qkv: Projection
    out: Projection
    mlp: MLP

    @classmethod
    def load(
        cls, tensors: Mapping[str, Tensor], prefix: str, n_head: int, pack: Pack
    ) -> EncoderLayer:
        return cls(
            n_head=n_head,
            norm=LayerNorm.load(tensors, f"{prefix}.self_attn_layer_norm"),
            qkv=load_qkv(tensors, f"{prefix}.self_attn", pack),
            out=pack(Linear.load(tensors, f"{prefix}.self_attn.out_proj")),
            mlp=MLP.load(tensors, prefix, pack),
        )

    def __call__(self, x: Tensor, attention: Attention) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        x = self.out.add_to(x, attention(self.qkv(self.norm(x)), self.n_head))
        return self.mlp(x)


class AudioEncoder:
    """The encoder's weights on one device, with a call."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        int8: bool = False,
    ) -> None:
        """int8: hold the weights of the layers' matrix products in 8 bits (CPU)."""
        dims = checkpoint.dims
        tensors = load_tensors(checkpoint, encoder_shapes(dims), dtype, device)
        pack = packer(device, dtype, int8=int8)
        self.dims = dims
        self.dtype = dtype
        self._conv1 = Conv.load(tensors, "encoder.conv1", stride=1)
        self._conv2 = Conv.load(tensors, "encoder.conv2", stride=2)
        self._positions = tensors["encoder.embed_positions.weight"]  # [n_audio_ctx, d]
        self._layers = [
            EncoderLayer.load(tensors, f"encoder.layers.{layer}", dims.n_audio_head, pack)
            for layer in range(dims.n_audio_layer)
        ]
        self._norm = LayerNorm.load(tensors, "encoder.layer_norm")
        self._attention = make_attention(device, dtype)

    def __call__(self, mel: Tensor) -> Tensor:
        """Encode features.

        Args:
            mel: [B, n_mels, 3000], any float dtype, on the encoder's device.

        Returns:
            States [B, 1500, n_audio_state] in the encoder's dtype.
        """
        x = self._conv2(self._conv1(mel.to(self.dtype)))
        x = (x.transpose(1, 2) + self._positions).to(self._norm.weight.dtype)  # [B, 1500, d]
        for layer in self._layers:
            x = layer(x, self._attention)
        return self._norm(x)
