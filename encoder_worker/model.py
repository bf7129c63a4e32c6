"""Whisper's audio encoder in torch: log-mel features to encoder states.

A pre-norm transformer over 1500 positions, or fewer; every shape comes from the checkpoint.
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

# Where the rest of the rows are copies, the number of computed rows is a multiple of this: torch
# takes some milliseconds to prepare a product with a new number of rows.
ALIKE_STEP = 32


@dataclass(frozen=True, slots=True)
class Conv:
    """Convolution of width 3 over time, then GELU."""

    weight: Tensor  # [n_out, n_in, 3]
    bias: Tensor
    stride: int
    unrolled: Projection  # the same, of three neighbouring rows: [n_out, 3 * n_in]

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str, stride: int, pack: Pack) -> Conv:
        weight, bias = tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"]
        flat = weight.transpose(1, 2).flatten(1)  # [n_out, 3 * n_in]
        return cls(weight, bias, stride, pack(Linear(flat, bias)))

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, n_in, T] -> [B, n_out, T / stride], zero-padded."""
        return F.gelu(F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1))

    def rows(self, x: Tensor) -> Tensor:
        """x [n, n_in], contiguous -> [(n - 3) // stride + 1, n_out], without padding."""
        n, n_in = x.shape
        shape = ((n - 3) // self.stride + 1, 3 * n_in)
        return self.unrolled.gelu(x.as_strided(shape, (self.stride * n_in, 1)).contiguous())


@dataclass(frozen=True, slots=True)
class EncoderLayer:
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
        """mel [B, n_mels, 2 * T], any float dtype -> states [B, T, n_audio_state]; T <= 1500."""
        x = self.embedded(mel)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embedded(self, mel: Tensor) -> Tensor:
        """Input of the first layer: mel as in `__call__` -> residual stream [B, T, d]."""
        x = self.conv2(self.conv1(mel.to(self.dtype)))
        return self._placed(x.transpose(1, 2))

    def _placed(self, x: Tensor) -> Tensor:
        """Add the positions to x [B, T, d], and make it contiguous."""
        # A plain sum keeps the convolution's strides, time innermost; every norm would copy it.
        stream = torch.empty(x.shape, dtype=self.norm.weight.dtype, device=x.device)
        return torch.add(x, self.positions[: x.shape[1]], out=stream)

    def embed_rows(self, mel: Tensor, begin: int, end: int, alike: range) -> Tensor:
        """Input of the first layer at positions begin to end of one window: [end - begin, d].

        mel: [1, n_mels, 2 * T] in the encoder's dtype. alike: positions that see the same features
        (`positions_alike`), computed once. The result has the residual stream's dtype.
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
    """Positions that see only the padding of a short window.

    mel [1, n_mels, 2 * T], whose last frames are all equal there. Position t sees frames 2t-2 to
    2t+2; the last position also sees beyond the window, so it is not among them.
    """
    differs = (mel[0] != mel[0, :, -1:]).any(0).nonzero()
    padded_from = int(differs[-1]) + 1 if len(differs) else 0
    return range((padded_from + 3) // 2, mel.shape[2] // 2 - 1)


def attention(qkv: Tensor, n_head: int) -> Tensor:
    """Attention of every position to all: qkv [B, T, 3 * d] -> [B, T, d]."""
    heads = qkv.view(*qkv.shape[:2], 3, n_head, -1)  # [B, T, 3, H, Dh]
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, Dh]
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
