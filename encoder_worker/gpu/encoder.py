"""The encoder's forward on a GPU with few kernels, in its dtype or in 8 bits (float8_e4m3fn).

Norms take the residual add and its bias along. In 8 bits norms and GELU also write rows with a
scale each, which brings a row's largest number to the dtype's largest; products are summed in
float32 and leave in bfloat16. Its word error rate was 0.16 points above float32's on 500 utterances
of the bundled model (95 % interval -0.13 to +0.51), computed on a CPU.

Rows are the positions of all windows of a batch, one after the other. `AudioEncoder` is the
reference, and runs where Triton does not load. On a CPU the operators' plain versions run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.errors import ConfigurationError
from cluster.common.kernels.gpu.kernels import define, has_triton, launcher
from cluster.common.kernels.gpu.operators import TRITON, Pending, add_norm, store_scaled
from cluster.common.kernels.gpu.self_check import FLOAT8 as FLOAT8_WAY
from cluster.common.kernels.gpu.self_check import (
    KERNELS,
    TORCH,
    in_float32,
    is_right,
    noise,
    turned_off,
)
from cluster.common.model.layers import LayerNorm, Linear, Projection, as_loaded
from encoder_worker.model import AudioEncoder, EncoderLayer, attention

FLOAT8 = torch.float8_e4m3fn
RESULT = torch.bfloat16
LOOKED_AT, FEW_ROWS = 2, 16  # `fastest` checks windows on the device, and rows on the CPU
LEAST_CAPABILITY = (8, 9)  # Ada or newer, for torch._scaled_mm


@dataclass(frozen=True, slots=True)
class Scaled:
    """Row i is values[i] * scale[i]."""

    values: Tensor  # float8_e4m3fn [n, d], contiguous
    scale: Tensor  # float32 [n]

    @classmethod
    def empty_like(cls, x: Tensor) -> Scaled:
        scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
        return cls(torch.empty(x.shape, dtype=FLOAT8, device=x.device), scale)

    @classmethod
    def of(cls, x: Tensor, *, gelu: bool = False) -> Scaled:
        """x [n, d], contiguous, of any float dtype; `gelu` is applied first."""
        made = cls.empty_like(x)
        _scale_rows(x, gelu, made.values, made.scale)
        return made


@dataclass(frozen=True, slots=True)
class _PlainLinear:
    """Shares the weights of its `Linear`; results are [n, n_out]."""

    linear: Linear
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> _PlainLinear:
        return cls(linear, linear.bias)

    def of_norm(self, x: Tensor, pending: Pending, norm: LayerNorm) -> Tensor:
        """The layer of norm(x + pending), x [n, n_in]; x becomes the sum."""
        return self.linear(pending.add_norm(x, norm))

    def without_bias(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """The product of x [n, n_in]; `gelu` is applied to x first."""
        return torch.mm(F.gelu(x) if gelu else x, self.linear.weight.t())


@dataclass(frozen=True, slots=True)
class Float8Linear:
    """Holds a copy of the weight with a scale for each output; methods as `_PlainLinear`."""

    weight: Scaled
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> Float8Linear:
        return cls(Scaled.of(linear.weight), linear.bias)

    def of_norm(self, x: Tensor, pending: Pending, norm: LayerNorm) -> Tensor:
        rows = Scaled.empty_like(x)
        add_norm(x, pending.delta, pending.bias, norm, rows.values, rows.scale)
        return self.of_scaled(rows, self.bias)

    def without_bias(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        return self.of_scaled(Scaled.of(x, gelu=gelu), None)

    def of_scaled(self, x: Scaled, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias: bfloat16 [n, n_out]."""
        weight = self.weight
        result: Tensor = _scaled_product(x.values, x.scale, weight.values, weight.scale, bias)
        return result


_Product = _PlainLinear | Float8Linear


@dataclass(frozen=True, slots=True)
class _GpuLayer:
    n_head: int
    norm: LayerNorm
    qkv: _Product
    out: _Product
    mlp_norm: LayerNorm
    fc1: _Product
    fc2: _Product

    @classmethod
    def of(cls, layer: EncoderLayer, make: Callable[[Linear], _Product]) -> _GpuLayer:
        def made(projection: Projection) -> _Product:
            return make(as_loaded(projection))

        mlp = layer.mlp
        return cls(
            *(layer.n_head, layer.norm, made(layer.qkv), made(layer.out)),
            *(mlp.norm, made(mlp.fc1), made(mlp.fc2)),
        )

    def __call__(self, x: Tensor, n_windows: int, pending: Pending) -> Pending:
        """x [n_windows * T, d]: the residual stream, without what is pending. Mutates x.

        Returns what this layer leaves to be added.
        """
        qkv = self.qkv.of_norm(x, pending, self.norm)
        mixed = attention(qkv.view(n_windows, -1, qkv.shape[1]), self.n_head).flatten(0, 1)
        pending = Pending(self.out.without_bias(mixed), self.out.bias)
        wide = self.fc1.of_norm(x, pending, self.mlp_norm)
        return Pending(self.fc2.without_bias(wide, gelu=True), self.fc2.bias)


class GpuEncoder:
    """Replaces an `AudioEncoder`."""

    def __init__(self, encoder: AudioEncoder, *, float8: bool = False) -> None:
        """Take the layers out of `encoder`, which cannot be called afterwards.

        float8: hold the weights of the layers' products in 8 bits; the originals are freed.
        """
        self.dims, self.dtype = encoder.dims, encoder.dtype
        make = _maker(float8=float8)
        self._encoder = encoder
        self._layers: list[_GpuLayer] = []
        while encoder.layers:
            self._layers.append(_GpuLayer.of(encoder.layers.pop(0), make))

    def __call__(self, mel: Tensor) -> Tensor:
        x = self._encoder.embedded(mel)
        rows, pending = x.flatten(0, 1), Pending()  # a view
        for layer in self._layers:
            pending = layer(rows, len(mel), pending)
        return pending.add_norm(rows, self._encoder.norm).view(x.shape)


Encoder = AudioEncoder | GpuEncoder


def _maker(*, float8: bool) -> Callable[[Linear], _Product]:
    return Float8Linear.of if float8 else _PlainLinear.of


@torch.inference_mode()
def fastest(encoder: AudioEncoder, *, float8: bool) -> Encoder:
    """The fastest encoder, of those asked for, that computes right on this device.

    Each is compared with plain float32 in the first layer and the last norm. Takes the layers out
    of `encoder` unless it returns it.

    Raises:
        ConfigurationError: torch's own products in this dtype are wrong.
    """
    layer, device = encoder.layers[0], encoder.positions.device
    shape = (LOOKED_AT, *encoder.positions.shape)
    x = noise(*shape, scale=0.1).to(device, encoder.norm.weight.dtype)  # below what a layer adds
    few = x[:1, :FEW_ROWS]

    def plain() -> list[Tensor]:
        """In float32: each window on the device, and a few rows on the CPU."""
        there, here = in_float32((layer, encoder.norm)), in_float32((layer, encoder.norm), "cpu")
        rows = torch.cat([there[1](there[0](window[None].float())) for window in x])
        return [rows, here[1](here[0](few.float().cpu()))]

    def by_torch() -> list[Tensor]:
        return [encoder.norm(layer(part)) for part in (x, few)]

    def by_kernels(*, float8: bool) -> list[Tensor]:
        made, results = _GpuLayer.of(layer, _maker(float8=float8)), []
        for part in (x, few):
            rows = part.flatten(0, 1).clone()
            pending = made(rows, len(part), Pending())
            results.append(pending.add_norm(rows, encoder.norm).view(part.shape))
        return results

    if has_triton():
        if float8 and is_right(FLOAT8_WAY, partial(by_kernels, float8=True), plain):
            return GpuEncoder(encoder, float8=True)
        if is_right(KERNELS, partial(by_kernels, float8=False), plain):
            return GpuEncoder(encoder)
    if is_right(TORCH, by_torch, plain):
        return encoder
    raise ConfigurationError(
        f"this GPU's products in {encoder.dtype} are wrong: {turned_off[TORCH]}; set encoder.dtype "
        "to float32, and tell who maintains its driver and torch"
    )


def check_float8(capability: tuple[int, int] | None, loads_triton: bool) -> None:
    """Raise ConfigurationError where float8 cannot be used; capability is None without CUDA."""
    fix = "set encoder.dtype to bfloat16"
    if capability is None:
        raise ConfigurationError(f"encoder.dtype float8 is for GPUs: {fix}, or to int8 on a CPU")
    if capability < LEAST_CAPABILITY:
        found, needed = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        raise ConfigurationError(
            f"encoder.dtype float8 needs a GPU of compute capability {needed}, this one has "
            f"{found}: {fix}"
        )
    if not loads_triton:
        raise ConfigurationError(f"encoder.dtype float8 needs Triton, which does not load: {fix}")


def _plain_rows(x: Tensor, gelu: bool, out: Tensor, scale: Tensor) -> None:
    values = x.float()
    store_scaled(F.gelu(values) if gelu else values, out, scale)


def _plain_product(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    y = (x.float() @ weight.float().t()) * scale[:, None] * weight_scale
    return (y if bias is None else y + bias.float()).to(RESULT)


def _multiply(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    product: Tensor = torch._scaled_mm(
        x, weight.t(), scale[:, None], weight_scale[None], bias=bias, out_dtype=RESULT
    )
    return product


def _shape(x: Tensor, scale: Tensor, weight: Tensor, *others: object) -> Tensor:
    return torch.empty((len(x), len(weight)), dtype=RESULT, device=x.device)


_scale_rows = define(
    "scale_rows",
    writes=("out", "scale"),
    cuda=launcher(TRITON, "launch_scale_rows"),
    cpu=_plain_rows,
)

_scaled_product = define("scaled_product", cuda=_multiply, cpu=_plain_product, shapes=_shape)
