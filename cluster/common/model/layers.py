"""The layers that encoder and decoder share, as frozen weights with a call; `load` takes HF's
names.

Plain dataclasses instead of `nn.Module`: nothing here trains, and a captured graph or a compiler
sees only tensors. `packer` chooses once, at load, what each matrix product becomes: as it is (the
reference, and what a GPU runs), packed for this CPU, or in int8. On a CPU oneDNN's own weight
layout takes 0.4 of the time of torch's default in float32 on AMD, and half of it in bfloat16 for
the few rows of a decode step; and it rounds once, after activation or residual.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

MIDDLE = 128  # zero of int8 rows that are held as uint8
MOST = 127  # of 8 bits with a sign
LEAST_SCALE = 1e-12  # of a row: one of zeros has this
# An x86 CPU without VNNI adds two products of a row and a weight in 16 bits, where 2 * 255 * 127
# does not fit and 2 * 255 * 63 does.
MOST_WITHOUT_VNNI = 63


class Projection(Protocol):
    """A product with frozen weights [n_out, n_in]; x [..., n_in], results [..., n_out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor:
        """The same through GELU (exact, by the error function)."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product, in the residual's dtype; a new tensor."""


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [n_out, n_in]; bias [n_out] or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str) -> Linear:
        return cls(tensors[f"{prefix}.weight"], tensors.get(f"{prefix}.bias"))

    @classmethod
    def fused(cls, parts: Sequence[Linear]) -> Linear:
        """One product for all `parts`, outputs side by side; a missing bias (Whisper's K) is 0."""
        weight = torch.cat([part.weight for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight, None)
        bias = [
            part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias
            for part in parts
        ]
        return cls(weight, torch.cat(bias))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


Pack = Callable[[Linear], Projection]


def as_it_is(linear: Linear) -> Projection:
    return linear


def as_loaded(projection: Projection) -> Linear:
    """A product that `as_it_is` kept, as a GPU's are: for kernels that need its weights."""
    assert isinstance(projection, Linear)
    return projection


def packer(device: torch.device | str, dtype: torch.dtype, *, int8: bool = False) -> Pack:
    """How a role on `device` prepares its products.

    int8: weights in 8 bits, a scale for each output; rows are quantised as they come. CPU only.
    """
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return as_it_is
    if int8:
        return DynamicInt8.of
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return as_it_is  # oneDNN refuses such weights on CPUs without AVX512
    return PackedLinear.of if dtype in (torch.float32, torch.bfloat16) else as_it_is


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """weight in oneDNN's layout (opaque) for this CPU; bias [n_out] or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> PackedLinear:
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
        return cls(packed, linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return _pointwise(x, self.weight, self.bias, "none", [], "")

    def gelu(self, x: Tensor) -> Tensor:
        return _pointwise(x, self.weight, self.bias, "gelu", [], "none")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if residual.dtype != x.dtype:
            return residual + self(x)
        return _binary(x, residual, self.weight, self.bias, "add")


@dataclass(frozen=True, slots=True)
class DynamicInt8:
    """int8 weights and activations, multiplied as integers; a scale for each output and each row.

    Weights have 7 bits on CPUs where 8 would saturate, and oneDNN's layout (opaque).
    """

    weight: Tensor
    scale: Tensor
    zeros: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> DynamicInt8:
        weight, scale = quantize_rows(linear.weight, _most_of_weights())
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        return cls(packed, scale, torch.zeros(len(scale), dtype=torch.int64), linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        signed, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        rows = signed.view(torch.uint8) ^ MIDDLE  # only unsigned rows have a fast kernel
        out = self.unscaled(rows, x.dtype)
        out *= scale.to(x.dtype)[:, None]
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)

    def unscaled(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The product of rows uint8 [n, n_in], their zero at MIDDLE, without their scales and the
        bias.

        [n, n_out] in `dtype`, times the weights' scale. One scale for all rows, here 1, is all that
        oneDNN's call knows, so the rows' own come after it.
        """
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, MIDDLE, self.weight, self.scale, self.zeros, None),
            *(1.0, 0, dtype, "none", [], ""),
        )
        return found

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


def quantize_rows(x: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """Each row of x [n, m] in -most..most with its own scale: int8 [n, m], float32 [n]."""
    scale = (x.abs().amax(-1).float() / most).clamp_(min=LEAST_SCALE)
    return (x * scale.reciprocal()[:, None]).round_().to(torch.int8), scale


def _most_of_weights() -> int:
    """The largest integer that this CPU multiplies without saturating its sums."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return MOST_WITHOUT_VNNI if on_x86 and not (has_vnni and has_vnni()) else MOST


def _pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, attr: str, scalars: list[Any], algorithm: str
) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, attr, scalars, algorithm)
    return found


def _binary(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, attr: str) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, attr)
    return found


LAYER_NORM_EPS = 1e-5


def stream_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """Of the residual stream, to which every layer adds, in a model that computes in `dtype`.

    On a CPU float32: its sums cost little there, and rounding each of them to bfloat16 is most of
    what bfloat16 changes. On a GPU `dtype`: float32 streams would be read and written through all
    layers, and emulated they gain nothing once the logits are summed in float32: +0.03 points of
    word error rate of 500 utterances without them, +0.00 to +0.16 with them.
    """
    return torch.float32 if torch.device(device).type == "cpu" else dtype


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight, bias [n], in the residual stream's dtype; what comes out is in `dtype`."""

    weight: Tensor
    bias: Tensor
    dtype: torch.dtype

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str) -> LayerNorm:
        weight, bias = tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"]
        stream = stream_dtype(weight.device, weight.dtype)
        return cls(weight.to(stream), bias.to(stream), weight.dtype)

    @property
    def arrays(self) -> tuple[Any, Any]:
        """NumPy arrays on the same memory; of a CPU."""
        return self.weight.numpy(), self.bias.numpy()

    def __call__(self, x: Tensor) -> Tensor:
        return self.unrounded(x).to(self.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        """The same in the residual stream's dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, slots=True)
class MLP:
    """The feed-forward half of a layer, with its norm in front and its residual behind."""

    norm: LayerNorm
    fc1: Projection
    fc2: Projection

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str, pack: Pack = as_it_is) -> MLP:
        return cls(
            norm=LayerNorm.load(tensors, f"{prefix}.final_layer_norm"),
            fc1=pack(Linear.load(tensors, f"{prefix}.fc1")),
            fc2=pack(Linear.load(tensors, f"{prefix}.fc2")),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2.add_to(x, self.fc1.gelu(self.norm(x)))


def load_qkv(tensors: Mapping[str, Tensor], prefix: str, pack: Pack = as_it_is) -> Projection:
    """The fused projection of one self-attention: [3 * d, d], order q, k, v."""
    names = ("q_proj", "k_proj", "v_proj")
    return pack(Linear.fused([Linear.load(tensors, f"{prefix}.{name}") for name in names]))
