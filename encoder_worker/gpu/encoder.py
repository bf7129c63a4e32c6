"""The encoder's forward on a GPU, of as few kernels as it may have, in its dtype or in 8 bits.

`PlainLayer` has eight in place of ten: two norms that take the residual add and its bias along,
four products, attention, and GELU. `Float8Layer` has nine: its norms write 8 bits and scales, GELU
takes those along, and only attention's result is brought to 8 bits by a kernel of its own.

Rows are the positions of all windows of a batch, one after the other. `AudioEncoder` stays the
reference and is what runs where Triton does not load. On a CPU this runs too, by the operators'
plain twins: so it is tested, and so its word error rate is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.norm import Pending, add_norm
from cluster.common.model.dims import ModelDims
from cluster.common.model.layers import LayerNorm, Linear, as_loaded
from encoder_worker.gpu.float8 import Float8Linear, Scaled
from encoder_worker.model import AudioEncoder, EncoderLayer, attention


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """Shares the weights of the layer that it is made of."""

    n_head: int
    norm: LayerNorm
    qkv: Linear
    out: Linear
    mlp_norm: LayerNorm
    fc1: Linear
    fc2: Linear

    @classmethod
    def of(cls, layer: EncoderLayer) -> PlainLayer:
        return cls(
            n_head=layer.n_head,
            norm=layer.norm,
            qkv=as_loaded(layer.qkv),
            out=as_loaded(layer.out),
            mlp_norm=layer.mlp.norm,
            fc1=as_loaded(layer.mlp.fc1),
            fc2=as_loaded(layer.mlp.fc2),
        )

    def __call__(self, x: Tensor, n_windows: int, pending: Pending) -> Pending:
        """x [n_windows * T, d], the residual stream, and what is still to be added to it.

        Mutates x; returns what this layer leaves to be added.
        """
        mixed = _mixed(self.qkv(pending.add_norm(x, self.norm)), n_windows, self.n_head)
        pending = Pending(torch.mm(mixed, self.out.weight.t()), self.out.bias)
        wide = F.gelu(self.fc1(pending.add_norm(x, self.mlp_norm)))
        return Pending(torch.mm(wide, self.fc2.weight.t()), self.fc2.bias)


@dataclass(frozen=True, slots=True)
class Float8Layer:
    """Has its own weights, of half the size."""

    n_head: int
    norm: LayerNorm
    qkv: Float8Linear
    out: Float8Linear
    mlp_norm: LayerNorm
    fc1: Float8Linear
    fc2: Float8Linear

    @classmethod
    def of(cls, layer: EncoderLayer) -> Float8Layer:
        return cls(
            n_head=layer.n_head,
            norm=layer.norm,
            qkv=Float8Linear.of(as_loaded(layer.qkv)),
            out=Float8Linear.of(as_loaded(layer.out)),
            mlp_norm=layer.mlp.norm,
            fc1=Float8Linear.of(as_loaded(layer.mlp.fc1)),
            fc2=Float8Linear.of(as_loaded(layer.mlp.fc2)),
        )

    def __call__(self, x: Tensor, n_windows: int, pending: Pending) -> Pending:
        """As `PlainLayer`'s."""
        qkv = self.qkv(_scaled_norm(pending, x, self.norm))
        mixed = Scaled.of(_mixed(qkv, n_windows, self.n_head))
        pending = Pending(self.out.without_bias(mixed), self.out.bias)
        wide = self.fc1(_scaled_norm(pending, x, self.mlp_norm))
        return Pending(self.fc2.without_bias(Scaled.of(wide, gelu=True)), self.fc2.bias)


def _scaled_norm(pending: Pending, x: Tensor, norm: LayerNorm) -> Scaled:
    out = Scaled.empty_like(x)
    add_norm(x, pending.delta, pending.bias, norm, out.values, out.scale)
    return out


def _mixed(qkv: Tensor, n_windows: int, n_head: int) -> Tensor:
    """Attention over each window: qkv [n_windows * T, 3 * d] -> [n_windows * T, d]."""
    return attention(qkv.view(n_windows, -1, qkv.shape[1]), n_head).flatten(0, 1)


class Encoder(Protocol):
    """`AudioEncoder`, and what computes the same."""

    dims: ModelDims
    dtype: torch.dtype

    def __call__(self, mel: Tensor) -> Tensor:
        """As `AudioEncoder`'s."""


class GpuEncoder:
    """Implements `Encoder`."""

    def __init__(self, encoder: AudioEncoder, *, float8: bool = False) -> None:
        """Takes the layers out of `encoder`, which cannot be called afterwards.

        float8: hold the weights of the layers' products in 8 bits; the originals are freed.
        """
        self.dims, self.dtype = encoder.dims, encoder.dtype
        make = Float8Layer.of if float8 else PlainLayer.of
        self._encoder = encoder
        self._layers: list[Float8Layer | PlainLayer] = []
        while encoder.layers:
            self._layers.append(make(encoder.layers.pop(0)))

    def __call__(self, mel: Tensor) -> Tensor:
        x = self._encoder.embedded(mel)
        rows, pending = x.flatten(0, 1), Pending()  # a view
        for layer in self._layers:
            pending = layer(rows, len(mel), pending)
        return pending.add_norm(rows, self._encoder.norm).view(x.shape)
