"""Whisper's audio encoder on torch: log-mel features to encoder states.

Pre-norm transformer over 1500 positions, or fewer; every shape comes from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import encoder_shapes
from cluster.common.model.layers import MLP, LayerNorm, Linear, Pack, Projection, load_qkv, packer
from cluster.common.model.weights import load_tensors

# Rows of a product are computed in such steps where only some of a unit's differ: a product of
# another number of rows is prepared anew, which takes some milliseconds.
ALIKE_STEP = 32


@dataclass(frozen=True, slots=True)
class Conv:
    """Convolution over time, width 3, with its activation: weight [n_out, n_in, 3].

    unrolled: the same as a product with three neighbouring rows, [n_out, 3 * n_in].
    """

    weight: Tensor
    bias: Tensor
    stride: int
    unrolled: Projection

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str, stride: int, pack: Pack) -> Conv:
        weight, bias = tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"]
        flat = weight.transpose(1, 2).flatten(1)  # [n_out, 3 * n_in]
        return cls(weight, bias, stride, pack(Linear(flat, bias)))

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, n_in, T] -> [B, n_out, T / stride], zeros around it."""
        return F.gelu(F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1))

    def rows(self, x: Tensor) -> Tensor:
        """x [n, n_in], contiguous -> [(n - 3) // stride + 1, n_out], without anything around it."""
        n, n_in = x.shape
        shape = ((n - 3) // self.stride + 1, 3 * n_in)
        return self.unrolled.gelu(x.as_strided(shape, (self.stride * n_in, 1)).contiguous())


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

    def __call__(self, x: Tensor) -> Tensor:
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
        plain = packer(device, dtype)
        self.conv1 = Conv.load(tensors, "encoder.conv1", 1, plain)
        self.conv2 = Conv.load(tensors, "encoder.conv2", 2, plain)
        self.positions = tensors["encoder.embed_positions.weight"]  # [n_audio_ctx, d]
        self.layers = [
            EncoderLayer.load(tensors, f"encoder.layers.{layer}", dims.n_audio_head, pack)
            for layer in range(dims.n_audio_layer)
        ]
        self.norm = LayerNorm.load(tensors, "encoder.layer_norm")

    def __call__(self, mel: Tensor) -> Tensor:
        """mel [B, n_mels, 2 * T], any float dtype -> states [B, T, n_audio_state] in the encoder's.

        T is n_audio_ctx, 1500, or less, which gives the states of a shorter context.
        """
        x = self.embedded(mel)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embedded(self, mel: Tensor) -> Tensor:
        """What goes into the first layer: mel as above -> [B, T, d], the residual stream."""
        x = self.conv2(self.conv1(mel.to(self.dtype)))
        return self._placed(x.transpose(1, 2))

    def _placed(self, x: Tensor) -> Tensor:
        """Add the positions: [B, T, d] of any strides -> the residual stream, contiguous.

        A sum alone would take the strides that the convolution left, time innermost; every norm
        would then copy, through all layers.
        """
        stream = torch.empty(x.shape, dtype=self.norm.weight.dtype, device=x.device)
        return torch.add(x, self.positions[: x.shape[1]], out=stream)

    def embed_rows(self, mel: Tensor, begin: int, end: int, alike: range) -> Tensor:
        """What goes into the first layer at some positions of one window: [end - begin, d].

        mel: [1, n_mels, 2 * T] in the encoder's dtype. alike: positions that see the same features
        (`positions_alike`), computed once. The rows are in the residual stream's dtype.
        """
        n_before = max(0, alike.start - begin) + 1
        first, last = begin + ALIKE_STEP * -(-n_before // ALIKE_STEP), min(end, alike.stop)
        if first >= last:
            x = self._convolved(mel, begin, end)
        else:
            before = self._convolved(mel, begin, first)
            behind = [self._convolved(mel, last, end)] if last < end else []
            x = torch.cat([before, before[-1:].expand(last - first, -1), *behind])
        return (x + self.positions[begin:end]).to(self.norm.weight.dtype)

    def _convolved(self, mel: Tensor, begin: int, end: int) -> Tensor:
        # Position t sees rows 2t-1..2t+1 of the first convolution, which see one more each side.
        first, last = 2 * begin - 1, 2 * end - 1
        n_rows = mel.shape[2]
        seen = mel[0, :, max(0, first - 1) : min(n_rows, last + 2)]
        seen = F.pad(seen, (max(0, 1 - first), max(0, last + 2 - n_rows)))
        x = self.conv1.rows(seen.t().contiguous())
        if first < 0:  # the second convolution sees zeros, not what the first makes of them
            x[0] = 0
        return self.conv2.rows(x)


def positions_alike(mel: Tensor) -> range:
    """Of the encoder's positions those that see nothing but a short window's padding.

    mel [1, n_mels, 2 * T], whose last frames are all the same there. A position t sees frames 2t-2
    to 2t+2; the last one sees beyond the window.
    """
    differs = (mel[0] != mel[0, :, -1:]).any(0).nonzero()
    padded_from = int(differs[-1]) + 1 if len(differs) else 0
    return range((padded_from + 3) // 2, mel.shape[2] // 2 - 1)


def attention(qkv: Tensor, n_head: int) -> Tensor:
    """Every position over all: qkv [B, T, 3 * d] -> [B, T, d]."""
    heads = qkv.view(*qkv.shape[:2], 3, n_head, -1)  # [B, T, 3, H, Dh]
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, Dh]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
