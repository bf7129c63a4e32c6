"""The encoder's forward on a GPU with few kernels: norms include the residual add and its bias.

Rows are the positions of all windows of a batch, one after the other. `AudioEncoder` is the
reference, and runs where Triton does not load. On a CPU the operators' plain versions run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.errors import ConfigurationError
from cluster.common.kernels.gpu.kernels import has_triton
from cluster.common.kernels.gpu.operators import Pending
from cluster.common.kernels.gpu.self_check import (
    KERNELS,
    TORCH,
    in_float32,
    is_right,
    noise,
    turned_off,
)
from cluster.common.model.layers import LayerNorm, Linear, as_loaded
from encoder_worker.model import AudioEncoder, EncoderLayer, attention

LOOKED_AT, FEW_ROWS = 2, 16  # `fastest` checks windows on the device, and rows on the CPU


@dataclass(frozen=True, slots=True)
class _GpuLayer:
    n_head: int
    norm: LayerNorm
    qkv: Linear
    out: Linear
    mlp_norm: LayerNorm
    fc1: Linear
    fc2: Linear

    @classmethod
    def of(cls, layer: EncoderLayer) -> _GpuLayer:
        mlp = layer.mlp
        return cls(
            *(layer.n_head, layer.norm, as_loaded(layer.qkv), as_loaded(layer.out)),
            *(mlp.norm, as_loaded(mlp.fc1), as_loaded(mlp.fc2)),
        )

    def __call__(self, x: Tensor, n_windows: int, pending: Pending) -> Pending:
        """x [n_windows * T, d]: the residual stream, without what is pending. Mutates x.

        Returns what this layer leaves to be added.
        """
        qkv = self.qkv(pending.add_norm(x, self.norm))
        mixed = attention(qkv.view(n_windows, -1, qkv.shape[1]), self.n_head).flatten(0, 1)
        pending = Pending(torch.mm(mixed, self.out.weight.t()), self.out.bias)
        wide = F.gelu(self.fc1(pending.add_norm(x, self.mlp_norm)))
        return Pending(torch.mm(wide, self.fc2.weight.t()), self.fc2.bias)


class GpuEncoder:
    """Replaces an `AudioEncoder`."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self.dims, self.dtype = encoder.dims, encoder.dtype
        self._encoder = encoder
        self._layers = [_GpuLayer.of(layer) for layer in encoder.layers]

    def __call__(self, mel: Tensor) -> Tensor:
        x = self._encoder.embedded(mel)
        rows, pending = x.flatten(0, 1), Pending()  # a view
        for layer in self._layers:
            pending = layer(rows, len(mel), pending)
        return pending.add_norm(rows, self._encoder.norm).view(x.shape)


Encoder = AudioEncoder | GpuEncoder


@torch.inference_mode()
def fastest(encoder: AudioEncoder) -> Encoder:
    """The fastest encoder that computes right on this device, with the weights of `encoder`.

    Each is compared with plain float32 in the first layer and the last norm.

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

    def by_kernels() -> list[Tensor]:
        made, results = _GpuLayer.of(layer), []
        for part in (x, few):
            rows = part.flatten(0, 1).clone()
            pending = made(rows, len(part), Pending())
            results.append(pending.add_norm(rows, encoder.norm).view(part.shape))
        return results

    if has_triton() and is_right(KERNELS, by_kernels, plain):
        return GpuEncoder(encoder)
    if is_right(TORCH, by_torch, plain):
        return encoder
    raise ConfigurationError(
        f"this GPU's products in {encoder.dtype} are wrong: {turned_off[TORCH]}; set encoder.dtype "
        "to float32, and tell who maintains its driver and torch"
    )
