"""Residual add, layer norm and, for products in 8 bits, the rows' scales: one kernel.

A layer's half ends with a product whose result is still to be added to the residual stream, and the
next half begins with a norm of that sum. Between the two nothing else needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.kernels import define, launcher
from cluster.common.model.layers import LAYER_NORM_EPS, LayerNorm

LEAST_SCALE = 1e-12  # of a row of zeros


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    bias: Tensor | None,
    norm: LayerNorm,
    out: Tensor,
    scale: Tensor | None = None,
) -> None:
    """x += delta + bias, rounded once; then out = norm(x). Mutates x, out and scale.

    Args:
        x: [n, d], contiguous like all others: the residual stream, of any float dtype.
        delta: [n, d], what is added; None adds nothing.
        bias: [d], added with it.
        out: [n, d], of any float dtype. float8_e4m3fn holds `norm(x) / scale`.
        scale: float32 [n], written where `out` has 8 bits: a row's largest number becomes the
            dtype's largest. None otherwise.
    """
    _operator(x, delta, bias, norm.weight, norm.bias, out, scale)


@dataclass(frozen=True, slots=True)
class Pending:
    """What is still to be added to the residual stream: delta [n, d], and the bias [d] of it."""

    delta: Tensor | None = None
    bias: Tensor | None = None

    def add_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """Add it to x, and the norm of the sum; [n, d], in the norm's dtype. Mutates x."""
        out = torch.empty_like(x, dtype=norm.dtype)
        add_norm(x, self.delta, self.bias, norm, out)
        return out


def _plain(
    x: Tensor,
    delta: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor,
    out: Tensor,
    scale: Tensor | None,
) -> None:
    if delta is not None:
        added = delta.float() if bias is None else delta.float() + bias.float()
        x.copy_(x.float() + added)
    normed = F.layer_norm(x.float(), weight.shape, weight.float(), shift.float(), LAYER_NORM_EPS)
    if scale is None:
        out.copy_(normed)
    else:
        store_scaled(normed, out, scale)


def store_scaled(values: Tensor, out: Tensor, scale: Tensor) -> None:
    """values float32 [n, d] into out float8_e4m3fn [n, d] and their rows' scales, float32 [n]."""
    most = torch.finfo(out.dtype).max
    torch.clamp(values.abs().amax(-1) / most, min=LEAST_SCALE, out=scale)
    # The quotient may round to just above the largest number, of which a cast makes NaN.
    out.copy_((values / scale[:, None]).clamp_(-most, most))


_operator = define(
    "add_norm",
    writes=("x", "out", "scale"),
    cuda=launcher("cluster.common.kernels.gpu.norm_kernel"),
    cpu=_plain,
)
