"""The layers that encoder and decoder share, as frozen weights with a call.

Plain dataclasses instead of `nn.Module`: nothing here trains, and a captured graph or a compiler
sees only tensors. `load` takes its tensors by Hugging Face's names; `fused` joins projections of
one input into one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-5


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
        """One product for all `parts`, outputs side by side in their order.

        A part without bias (Whisper's K) gets zeros where another part has one.
        """
        weight = torch.cat([part.weight for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight, None)
        bias = [
            part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias
            for part in parts
        ]
        return cls(weight, torch.cat(bias))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n_in] -> [..., n_out]."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight, bias [n]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str) -> LayerNorm:
        return cls(tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, slots=True)
class MLP:
    """The feed-forward half of a layer, with its norm in front; the caller adds the residual."""

    norm: LayerNorm
    fc1: Linear
    fc2: Linear

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], prefix: str) -> MLP:
        """`prefix` is the layer's: "encoder.layers.0"."""
        return cls(
            norm=LayerNorm.load(tensors, f"{prefix}.final_layer_norm"),
            fc1=Linear.load(tensors, f"{prefix}.fc1"),
            fc2=Linear.load(tensors, f"{prefix}.fc2"),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


def load_qkv(tensors: Mapping[str, Tensor], prefix: str) -> Linear:
    """The fused projection of one self-attention ("...self_attn"): [3 * d, d], order q, k, v."""
    return Linear.fused(
        [Linear.load(tensors, f"{prefix}.{name}") for name in ("q_proj", "k_proj", "v_proj")]
    )
