"""Matrix products and attention of a layer for some rows, as a team's thread computes them.

`make_products` and `make_attention` choose the implementation once for an encoder and its CPU. No
numba.
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

ROWS = 250  # most of a unit, so that its hidden rows (1 MB for base) stay in cache
# Most of a unit in int8 for up to two threads. Reading the weights takes most of the time, and
# larger units read them less often: at width 512 they take four fifths of the time of ROWS. Wider
# models have fewer rows, since urgent work waits for a unit of bulk work.
INT8_VALUES = 750 * 512  # rows times width
LOG2_E = math.log2(math.e)


def make_products(encoder: AudioEncoder, kernels: TeamKernels) -> Products:
    in_int8 = isinstance(encoder.layers[0].qkv, DynamicInt8)
    if in_int8 and kernels.int8 is not None:
        return Int8Products(encoder, kernels.int8)
    return PlainProducts(encoder, kernels)


class PlainProducts:
    """Products in the encoder's dtype, computed on the calling thread; thread-safe.

    "normed" are the rows behind a layer's norm, from which its q, k and v are computed;
    `Int8Products` has them quantised.
    """

    most_rows = ROWS  # of a unit, for up to two threads

    def __init__(self, encoder: AudioEncoder, kernels: TeamKernels) -> None:
        self._layers, self._kernels = encoder.layers, kernels
        self._norms = [*(layer.norm for layer in encoder.layers), encoder.norm]

    def begin(self, x: Tensor) -> Tensor:
        """Residual stream float32 [n, d] -> normed rows of the first layer."""
        return self._norms[0](x)

    def project(self, index: int, normed: Tensor, *heads: Any) -> None:
        """Compute a layer's q, k and v into heads, the outputs of `TeamKernels.split`."""
        self._kernels.split(as_array(self._layers[index].qkv(normed)), *heads)

    def layer(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """Add the product of `attended` [n, d] and then the MLP to x.

        Returns the normed rows of the next layer.
        """
        layer = self._layers[index]
        normed = torch.empty_like(attended)
        self._add_norm(x, layer.out(attended), layer.mlp.norm, normed)
        delta = layer.mlp.fc2(layer.mlp.fc1.gelu(normed))
        self._add_norm(x, delta, self._norms[index + 1], normed)
        return normed

    def last_layer(self, x: Tensor, attended: Tensor) -> Tensor:
        """Do the same for the last layer; returns the encoder's states [n, d]."""
        return self.layer(len(self._layers) - 1, x, attended)

    def _add_norm(self, x: Tensor, delta: Tensor, norm: LayerNorm, out: Tensor) -> None:
        self._kernels.add_norm(as_array(x), as_array(delta), *norm.arrays, as_array(out))


@dataclass(frozen=True, slots=True)
class Int8Rows:
    rows: Tensor  # uint8 [n, m], zero at MIDDLE
    scales: Any  # float32 [n], an array

    @classmethod
    def empty(cls, n: int, m: int) -> Int8Rows:
        return cls(torch.empty(n, m, dtype=torch.uint8), np.empty(n, np.float32))

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self.rows.numpy(), self.scales


@dataclass(frozen=True, slots=True)
class Int8Product:
    product: DynamicInt8
    bias: Any  # an array, float32 [n_out]; zeros where the product has none

    @classmethod
    def of(cls, projection: Projection) -> Int8Product:
        assert isinstance(projection, DynamicInt8)
        bias = projection.bias
        n_out = len(projection.scale)
        return cls(
            projection, np.zeros(n_out, np.float32) if bias is None else bias.float().numpy()
        )

    def __call__(self, x: Int8Rows, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """The arguments of kernels: product in `dtype`, scales, bias."""
        return as_array(self.product.unscaled(x.rows, dtype)), x.scales, self.bias


class Int8Products:
    """oneDNN's products of integers; rows are quantised where they are made, in cache."""

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
        """Add the product of `attended` to x; returns the MLP's result, still to be added."""
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
    """Torch's attention: for float32, and for CPUs and head sizes without a kernel of ours.

    key_multiple: k and v have room for a multiple of so many keys, zeros behind the last.
    values_by_dim: v is a view of [H, Dh, T]. centres_keys: keys come without their mean, which
    softmax does not see. lay_out: what is made of a layer's k and v once they are complete, for all
    calls.
    """

    key_multiple, values_by_dim, centres_keys = 1, False, False

    def lay_out(self, k: Tensor, v: Tensor, n_keys: int) -> Any:
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, n_keys: int, laid_out: Any = None
    ) -> Tensor:
        """q [H, n, Dh], contiguous; k, v [H, T, Dh], T >= n_keys -> [n, H * Dh] in their dtype."""
        # Without a batch dimension torch takes its slow path, through all scores.
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).flatten(1)


class TileAttention:
    """Attention by the CPU's bfloat16 tiles; scores stay in float32 and in cache."""

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
    """Attention by 8-bit vectors; keys and values are laid out once for all units."""

    key_multiple, values_by_dim, centres_keys = 1, False, True

    def __init__(self, kernels: TeamKernels) -> None:
        assert kernels.vectors is not None
        self._kernels = kernels.vectors

    def lay_out(self, k: Tensor, v: Tensor, n_keys: int) -> Any:
        """Blocks and scales of keys and of values, as `vector_attention.lay_out_heads`."""
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
