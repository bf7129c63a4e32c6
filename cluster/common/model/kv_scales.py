"""Scales by which cross-attention K and V are divided before they are stored in 8 bits.

A scale for each layer's V and for each head of its K brings every possible value into the range of
float8_e4m3fn, 2^-9 to 448. It follows from the weights alone: the projections read the encoder's
last norm, whose rows have a length of at most sqrt(d) before its weight and bias. Scales are powers
of two and go into the weights on both sides, which is exact, so that kernels know nothing of them.
V has one scale a layer, so that the output projection keeps its proportions in int8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import cross_kv_shapes, encoder_shapes
from cluster.common.model.layers import Linear
from cluster.common.model.weights import load_tensors

MARGIN = 1.02  # states are rounded to 16 bits before they are projected
NORM = "encoder.layer_norm"


@dataclass(frozen=True, slots=True)
class KVScales:
    """K and V are what is stored, times these powers of two: float32 [L, H] and [L]."""

    keys: Tensor
    values: Tensor

    def shrink(self, layer: int, name: str, projection: Linear) -> Linear:
        """Return the projection to K or V ("k_proj", "v_proj") that gives the values to store."""
        if name == "v_proj":
            scale = self.values[layer].expand(len(projection.weight))
        else:
            scale = self._rows(layer, len(projection.weight))
        scale = scale.to(projection.weight)
        bias = None if projection.bias is None else projection.bias / scale
        return replace(projection, weight=projection.weight / scale[:, None], bias=bias)

    def grow(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a decoder's tensors with query and output projections that undo the scales."""
        grown = dict(tensors)
        for layer in range(len(self.values)):
            prefix = f"decoder.layers.{layer}.encoder_attn"
            bias = grown[f"{prefix}.q_proj.bias"]
            rows = self._rows(layer, len(bias)).to(bias)
            grown[f"{prefix}.q_proj.bias"] = bias * rows
            grown[f"{prefix}.q_proj.weight"] = grown[f"{prefix}.q_proj.weight"] * rows[:, None]
            out = grown[f"{prefix}.out_proj.weight"]
            grown[f"{prefix}.out_proj.weight"] = out * self.values[layer].to(out)
        return grown

    def _rows(self, layer: int, n: int) -> Tensor:
        heads = self.keys[layer]
        return heads.repeat_interleave(n // len(heads))


def kv_scales(checkpoint: Checkpoint, stored_in: torch.dtype) -> KVScales | None:
    """Return None for a dtype that needs no scales. Raises CheckpointError."""
    if stored_in is not torch.float8_e4m3fn:
        return None
    dims, most = checkpoint.dims, torch.finfo(stored_in).max
    shapes = encoder_shapes(dims)
    names = (f"{NORM}.weight", f"{NORM}.bias")
    weight, bias = load_tensors(checkpoint, {name: shapes[name] for name in names}).values()
    keys, values = [], []
    for layer in range(dims.n_text_layer):
        prefix = f"decoder.layers.{layer}.encoder_attn"
        own = {k: v for k, v in cross_kv_shapes(dims).items() if k.startswith(f"{prefix}.")}
        tensors = load_tensors(checkpoint, own)  # a layer at a time, to save memory
        k, v = (_bound(tensors, f"{prefix}.{name}", weight, bias) for name in ("k_proj", "v_proj"))
        keys.append(k.view(dims.n_text_head, -1).amax(1))
        values.append(v.amax())
    return KVScales(_scale(torch.stack(keys) / most), _scale(torch.stack(values) / most))


def _bound(tensors: Mapping[str, Tensor], name: str, weight: Tensor, bias: Tensor) -> Tensor:
    """Bound the magnitude of each output of W (weight * z + bias) + b over all |z| = sqrt(d)."""
    linear = Linear.load(tensors, name)
    centre = linear.weight @ bias
    if linear.bias is not None:
        centre = centre + linear.bias
    spread = (linear.weight * weight).norm(dim=1) * math.sqrt(len(weight))
    bound: Tensor = centre.abs() + spread
    return bound


def _scale(least: Tensor) -> Tensor:
    return torch.where(least > 0, torch.exp2(torch.ceil(torch.log2(MARGIN * least))), 1.0)
