"""The layers that encoder and decoder share, as frozen weights with a call.

Plain dataclasses instead of `nn.Module`: nothing here trains, and a captured graph or a compiler
sees only tensors. `load` takes its tensors by Hugging Face's names; `pack` prepares each matrix
product for the device (`cluster.model.linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.model.linear import Linear, Pack, Projection, as_it_is

LAYER_NORM_EPS = 1e-5


def stream_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """Of the residual stream, to which every layer adds, in a model that computes in `dtype`.

    On a CPU float32: its sums cost little there, and rounding each of them to bfloat16 is most of
    what bfloat16 changes. On a GPU `dtype`: float32 streams would be read and written through all
    layers, and emulated they gain nothing once the logits are summed in float32
    (`benchmark.accuracy.gpu_rounding`).
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
        """weight, bias as NumPy arrays on the same memory; of a CPU."""
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
        """`prefix` is the layer's: "encoder.layers.0"."""
        return cls(
            norm=LayerNorm.load(tensors, f"{prefix}.final_layer_norm"),
            fc1=pack(Linear.load(tensors, f"{prefix}.fc1")),
            fc2=pack(Linear.load(tensors, f"{prefix}.fc2")),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2.add_to(x, self.fc1.gelu(self.norm(x)))


def load_qkv(tensors: Mapping[str, Tensor], prefix: str, pack: Pack = as_it_is) -> Projection:
    """The fused projection of one self-attention ("...self_attn"): [3 * d, d], order q, k, v."""
    names = ("q_proj", "k_proj", "v_proj")
    return pack(Linear.fused([Linear.load(tensors, f"{prefix}.{name}") for name in names]))
