"""What a team's thread does of a layer for some rows: its matrix products, and attention. No numba.

`make_products` and `make_attention` choose once for an encoder and its CPU, in one dtype or int8;
the team then computes its layers without a branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.cpu.machine_code import as_array
from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    HEAD_DIM,
    TILE_INPUTS,
    TILE_ROWS,
    TILES_OF_BLOCK,
    tile_config,
)
from cluster.common.model.layers import DynamicInt8, LayerNorm, Projection
from encoder_worker.model import AudioEncoder

if TYPE_CHECKING:
    from encoder_worker.cpu.rows import Int8Kernels
    from encoder_worker.cpu.team_kernels import TeamKernels

ROWS = 250  # most of a unit: its hidden rows (1 MB for base) stay in cache between products
# Of int8, where one or two threads share a window. Reading a layer's weights takes most of the time
# of its products, and so many rows read them once: four fifths of the time of ROWS in a model 512
# wide. Wider ones have fewer, since what must wait for bulk work waits for a unit.
INT8_VALUES = 750 * 512  # rows times width
LOG2_E = math.log2(math.e)


def make_products(encoder: AudioEncoder, kernels: TeamKernels) -> Products:
    in_int8 = isinstance(encoder.layers[0].qkv, DynamicInt8)
    if in_int8 and kernels.int8 is not None:
        return Int8Products(encoder, kernels.int8)
    return PlainProducts(encoder, kernels)


class PlainProducts:
    """By the encoder's own products, with rows in its dtype.

    Computes on the calling thread; used by many at a time. What is "normed" are the rows behind a
    layer's norm, with which its products for q, k and v begin; `Int8Products` has them quantised.
    most_rows: at a time, of one or two threads.
    """

    most_rows = ROWS

    def __init__(self, encoder: AudioEncoder, kernels: TeamKernels) -> None:
        self._layers, self._kernels = encoder.layers, kernels
        self._norms = [*(layer.norm for layer in encoder.layers), encoder.norm]

    def begin(self, x: Tensor) -> Tensor:
        """Of the first layer, from the residual stream float32 [n, d]: normed."""
        return self._norms[0](x)

    def project(self, index: int, normed: Tensor, *heads: Any) -> None:
        """A layer's queries, keys and values; heads: where they go, as `TeamKernels.split` says."""
        self._kernels.split(as_array(self._layers[index].qkv(normed)), *heads)

    def layer(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention in a layer that is not the last one: normed.

        Adds to x the product of what its rows attended to [n, d], then the MLP.
        """
        layer = self._layers[index]
        normed = torch.empty_like(attended)
        self._add_norm(x, layer.out(attended), layer.mlp.norm, normed)
        delta = layer.mlp.fc2(layer.mlp.fc1.gelu(normed))
        self._add_norm(x, delta, self._norms[index + 1], normed)
        return normed

    def last_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        """The same in the last one; the encoder's states [n, d]."""
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

    def project(self, index: int, normed: Int8Rows, *heads: Any) -> None:
        self._kernels.split(*self._qkv[index](normed, self._dtype), *heads)

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


Products = PlainProducts | Int8Products


def make_attention(kernels: TeamKernels, head_dim: int) -> Attention:
    if kernels.attend is not None and head_dim == HEAD_DIM:
        return TileAttention(kernels)
    if kernels.vectors is not None and head_dim == HEAD_DIM:
        return VectorAttention(kernels)
    return TorchAttention()


class TorchAttention:
    """By torch's own kernel: in float32, and where nothing else is made for the CPU or the heads.

    For many threads at a time.

    key_multiple: memory has room for a multiple of so many keys, and zeros behind the last.
    values_by_dim: values lie as [H, Dh, T], and are given as a view of that. centres_keys: keys
    come without their mean, which softmax does not see. lay_out: what is made of a layer's keys
    and values once all of them stand, and then given to each call.
    """

    key_multiple, values_by_dim, centres_keys = 1, False, False

    def lay_out(self, k: Tensor, v: Tensor, n_keys: int) -> Any:
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, n_keys: int, laid_out: Any = None
    ) -> Tensor:
        """Queries q [H, n, Dh], contiguous, over all of n_keys keys: [n, H * Dh] in their dtype.

        k, v: [H, T, Dh], T at least n_keys.
        """
        # With a batch in front: without one torch takes its slow way, through all scores.
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).flatten(1)


class TileAttention:
    """By the CPU's tiles in bfloat16: scores stay float32, and in a core's cache."""

    key_multiple, values_by_dim, centres_keys = TILE_INPUTS, True, False

    def __init__(self, kernels: TeamKernels) -> None:
        assert kernels.attend is not None
        self._attend: Any = kernels.attend
        self._config = tile_config()

    def lay_out(self, k: Tensor, v: Tensor, n_keys: int) -> Any:
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, n_keys: int, laid_out: Any = None
    ) -> Tensor:
        n_head, n, head_dim = q.shape
        out = q.new_empty(n, n_head * head_dim)
        self._attend(
            as_array(q).view(np.uint32),
            as_array(k),
            as_array(v.transpose(1, 2)),
            n_keys,
            np.float32(head_dim**-0.5 * LOG2_E),
            self._config,
            as_array(out).view(np.uint32),
        )
        return out


class VectorAttention:
    """By the CPU's vectors of 8 bits: keys and values are laid out once for all units."""

    key_multiple, values_by_dim, centres_keys = 1, False, True

    def __init__(self, kernels: TeamKernels) -> None:
        assert kernels.vectors is not None
        self._kernels = kernels.vectors

    def lay_out(self, k: Tensor, v: Tensor, n_keys: int) -> Any:
        """As `vector_attention.lay_out_heads` has it: of keys and of values, blocks and scales."""
        n_head, n_blocks = len(k), -(-n_keys // BLOCK_OUTPUTS)
        blocks = np.empty((2, n_head, n_blocks, TILES_OF_BLOCK, TILE_ROWS, TILE_ROWS), np.int32)
        of_keys = np.empty((n_head, 2, n_blocks * BLOCK_OUTPUTS), np.float32)
        of_values = np.empty((n_head, 2, HEAD_DIM), np.float32)
        laid_out = (blocks[0], of_keys), (blocks[1], of_values)
        self._kernels.lay_out(as_array(k), as_array(v), n_keys, *laid_out)
        return laid_out

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n_keys: int, laid_out: Any) -> Tensor:
        n_head, n, head_dim = q.shape
        out = q.new_empty(n, n_head * head_dim)
        scale = np.float32(head_dim**-0.5 * LOG2_E)
        self._kernels.attend(as_array(q), *laid_out, scale, as_array(out))
        return out


Attention = TorchAttention | TileAttention | VectorAttention
