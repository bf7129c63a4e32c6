"""The layers that encoder and decoder share: frozen weights with a call.

`packer` chooses at load what each matrix product becomes: weights as they are (the reference, and
on a GPU), oneDNN's layout for this CPU, or int8. oneDNN's layout takes 0.4 of the time of torch's
default in float32 on AMD and half of it in bfloat16 for a decode step's few rows. It rounds once,
after the activation or the residual.
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
MOST = 127  # the largest int8
LEAST_SCALE = 1e-12  # the scale of a row of zeros
# An x86 CPU without VNNI adds two products of a row and a weight in 16 bits, where 2 * 255 * 127
# does not fit and 2 * 255 * 63 does.
MOST_WITHOUT_VNNI = 63


class Projection(Protocol):
    """A matrix product with frozen weights [n_out, n_in]: x [..., n_in] to [..., n_out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor:
        """Return GELU of the product (exact, by the error function)."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + product, a new tensor of the residual's dtype."""


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
        """Concatenate the outputs of `parts`. A missing bias (Whisper's K) becomes 0."""
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
    """Return a product's weights on a GPU, where `as_it_is` kept them."""
    assert isinstance(projection, Linear)
    return projection


def packer(device: torch.device | str, dtype: torch.dtype, *, int8: bool = False) -> Pack:
    """Choose how a role on `device` prepares its products. `int8` has an effect on a CPU only."""
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
    """Integer products of int8 weights, with a scale for each output, and int8 rows, with a scale
    for each. Weights have oneDNN's layout (opaque), and 7 bits on CPUs whose sums 8 would saturate.
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
        """Multiply rows uint8 [n, n_in], whose zero is MIDDLE, by the scaled weights: [n, n_out] in
        `dtype`, without the bias and the rows' scales, which oneDNN's call does not take.
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
    """Scale each row of x [n, m] into -most..most. Returns int8 [n, m] and scales, float32 [n]."""
    scale = (x.abs().amax(-1).float() / most).clamp_(min=LEAST_SCALE)
    return (x * scale.reciprocal()[:, None]).round_().to(torch.int8), scale


def _most_of_weights() -> int:
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
    """Return the dtype of the residual stream in a model that computes in `dtype`.

    Float32 sums cost little on a CPU and remove most of bfloat16's error. On a GPU they cost
    bandwidth in every layer and did not lower the word error rate of 500 utterances.
    """
    return torch.float32 if torch.device(device).type == "cpu" else dtype


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight and bias [n] have the residual stream's dtype, results have `dtype`."""

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
        return self.weight.numpy(), self.bias.numpy()

    def __call__(self, x: Tensor) -> Tensor:
        return self.unrounded(x).to(self.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, slots=True)
class MLP:
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
    """Load the fused projection of one self-attention, [3 * d, d] in the order q, k, v."""
    names = ("q_proj", "k_proj", "v_proj")
    return pack(Linear.fused([Linear.load(tensors, f"{prefix}.{name}") for name in names]))
