"""A layer's matrix products for some rows, with what stands between them: in one dtype, or int8.

`make_products` chooses once for an encoder; the team then computes its layers without a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.background import as_array
from cluster.common.model.layers import DynamicInt8, LayerNorm, Projection
from encoder_worker.cpu.int8_rows import Int8Kernels
from encoder_worker.cpu.team_kernels import TeamKernels
from encoder_worker.model import AudioEncoder

ROWS = 250  # most of a unit: its hidden rows (1 MB for base) stay in cache between products
# Of int8, where one or two threads share a window. Reading a layer's weights takes most of the time
# of its products, and so many rows read them once: four fifths of the time of ROWS in a model 512
# wide. Wider ones have fewer, since what must wait for bulk work waits for a unit.
INT8_VALUES = 750 * 512  # rows times width

Normed = TypeVar("Normed")


@dataclass(frozen=True, slots=True)
class Heads:
    """Where queries, keys and values of positions from `begin` on go; see `TeamKernels.split`."""

    begin: int
    q: Any
    k: Any
    v: Any
    key_sums: Any


class Products(Protocol, Generic[Normed]):
    """Computes on the calling thread; used by many at a time.

    Normed is what a layer's products for q, k and v begin with: the rows behind its norm.
    most_rows: at a time, of one or two threads.
    """

    most_rows: int

    def begin(self, x: Tensor) -> Normed:
        """Of the first layer, from the residual stream float32 [n, d]."""

    def project(self, index: int, normed: Normed, heads: Heads) -> None:
        """A layer's queries, keys and values."""

    def layer(self, index: int, x: Tensor, attended: Tensor) -> Normed:
        """What follows attention in a layer that is not the last one.

        Adds to x the product of what its rows attended to [n, d], then the MLP.
        """

    def last_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        """The same in the last one; the encoder's states [n, d]."""


def make_products(encoder: AudioEncoder, kernels: TeamKernels) -> Products[Any]:
    """int8 needs its kernels; without them the encoder's own products do it."""
    in_int8 = isinstance(encoder.layers[0].qkv, DynamicInt8)
    if in_int8 and kernels.int8 is not None:
        return Int8Products(encoder, kernels.int8)
    return PlainProducts(encoder, kernels)


class PlainProducts:
    """By the encoder's own products, with rows in its dtype."""

    most_rows = ROWS

    def __init__(self, encoder: AudioEncoder, kernels: TeamKernels) -> None:
        self._layers, self._kernels = encoder.layers, kernels
        self._norms = [*(layer.norm for layer in encoder.layers), encoder.norm]

    def begin(self, x: Tensor) -> Tensor:
        return self._norms[0](x)

    def project(self, index: int, normed: Tensor, heads: Heads) -> None:
        qkv = as_array(self._layers[index].qkv(normed))
        self._kernels.split(qkv, heads.begin, heads.q, heads.k, heads.v, heads.key_sums)

    def layer(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        layer = self._layers[index]
        normed = torch.empty_like(attended)
        self._add_norm(x, layer.out(attended), layer.mlp.norm, normed)
        delta = layer.mlp.fc2(layer.mlp.fc1.gelu(normed))
        self._add_norm(x, delta, self._norms[index + 1], normed)
        return normed

    def last_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.layer(len(self._layers) - 1, x, attended)

    def _add_norm(self, x: Tensor, delta: Tensor, norm: LayerNorm, out: Tensor) -> None:
        self._kernels.add_norm(as_array(x), as_array(delta), *norm.arrays, as_array(out))


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """rows uint8 [n, m], zero at MIDDLE; scales float32 [n], an array."""

    rows: Tensor
    scales: Any

    @classmethod
    def empty(cls, n: int, m: int) -> Int8Rows:
        return cls(torch.empty(n, m, dtype=torch.uint8), np.empty(n, np.float32))

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self.rows.numpy(), self.scales


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A product with its bias as an array, float32 [n_out]; zeros where it has none."""

    product: DynamicInt8
    bias: Any

    @classmethod
    def of(cls, projection: Projection) -> Int8Product:
        assert isinstance(projection, DynamicInt8)
        bias = projection.bias
        n_out = len(projection.scale)
        return cls(
            projection, np.zeros(n_out, np.float32) if bias is None else bias.float().numpy()
        )

    def __call__(self, x: Int8Rows, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """What kernels take: product in `dtype`, scales, bias."""
        return as_array(self.product.unscaled(x.rows, dtype)), x.scales, self.bias


class Int8Products:
    """By oneDNN's products of integers; rows are quantised where they are made, in cache."""

    def __init__(self, encoder: AudioEncoder, kernels: Int8Kernels) -> None:
        self.most_rows = max(ROWS, INT8_VALUES // encoder.dims.n_audio_state)
        self._kernels, self._dtype = kernels, encoder.dtype
        self._norms = [*(layer.norm for layer in encoder.layers), encoder.norm]
        self._mlp_norms = [layer.mlp.norm for layer in encoder.layers]
        self._qkv = [Int8Product.of(layer.qkv) for layer in encoder.layers]
        self._out = [Int8Product.of(layer.out) for layer in encoder.layers]
        self._fc1 = [Int8Product.of(layer.mlp.fc1) for layer in encoder.layers]
        self._fc2 = [Int8Product.of(layer.mlp.fc2) for layer in encoder.layers]

    def begin(self, x: Tensor) -> Int8Rows:
        return self._quantized(self._norms[0](x))

    def project(self, index: int, normed: Int8Rows, heads: Heads) -> None:
        product = self._qkv[index](normed, self._dtype)
        self._kernels.split(*product, heads.begin, heads.q, heads.k, heads.v, heads.key_sums)

    def layer(self, index: int, x: Tensor, attended: Tensor) -> Int8Rows:
        delta = self._deltas(index, x, attended)
        return self._add_norm(x, delta, self._norms[index + 1])

    def last_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        delta = self._deltas(len(self._out) - 1, x, attended)
        states = torch.empty_like(attended)
        self._kernels.add_norm(as_array(x), *delta, *self._norms[-1].arrays, as_array(states))
        return states

    def _deltas(self, index: int, x: Tensor, attended: Tensor) -> tuple[Any, Any, Any]:
        """Adds to x the product of `attended`; what the MLP then adds."""
        delta = self._out[index](self._quantized(attended), self._dtype)
        normed = self._add_norm(x, delta, self._mlp_norms[index])
        wide = self._fc1[index](normed, self._dtype)
        hidden = Int8Rows.empty(*wide[0].shape)
        self._kernels.gelu_quantize(*wide, *hidden.arrays)
        return self._fc2[index](hidden, self._dtype)

    def _add_norm(self, x: Tensor, delta: tuple[Any, Any, Any], norm: LayerNorm) -> Int8Rows:
        normed = Int8Rows.empty(*x.shape)
        self._kernels.add_norm_quantize(as_array(x), *delta, *norm.arrays, *normed.arrays)
        return normed

    def _quantized(self, x: Tensor) -> Int8Rows:
        rows = Int8Rows.empty(*x.shape)
        self._kernels.quantize(as_array(x), *rows.arrays)
        return rows
