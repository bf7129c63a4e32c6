"""A product of few rows with frozen weights, fused with what comes before and after it: one kernel.

In front of it a layer norm; behind it the bias, GELU or the sum with the residual stream. It reads
its weights once, which is all that the time of a few rows depends on.

With a norm in front the product runs over the rows as they are, times the norm's weight: what
centring and scaling would have changed is put right behind it, from the rows' mean and deviation,
which the same pass over the rows finds: norm(x) @ W.T + b is

    ((x * gain) @ W.T - mean * (W @ gain)) / deviation + (W @ shift + b)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.kernels import define, launcher
from cluster.common.model.layers import LAYER_NORM_EPS, LayerNorm, Linear

MAX_ROWS = 64  # more are a matrix product of their own right: cuBLAS's
INNER_MULTIPLE = 16  # what n_in must be a multiple of, for tensor cores take so many at once
PROGRAMS = 128  # wanted at least: an H100 has 132 multiprocessors
OUTER_BLOCKS = (64, 32, 16)


@dataclass(frozen=True, slots=True)
class FewRows:
    """weight [n_out, n_in], bias [n_out] or None; with a norm in front gain [n_in], and `sums`.

    sums: float32 [n_out], W @ gain; the bias then has W @ shift in it, and is float32.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor | None = None
    sums: Tensor | None = None

    @classmethod
    def of(cls, linear: Linear, norm: LayerNorm | None = None) -> FewRows:
        """Shares the linear's weight and makes no copy of it."""
        if norm is None:
            return cls(linear.weight, linear.bias)
        weight = linear.weight.float()
        bias = weight @ norm.bias.float()
        if linear.bias is not None:
            bias += linear.bias.float()
        return cls(linear.weight, bias, norm.weight, weight @ norm.weight.float())

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """out = x @ weight.T + bias, of norm(x) where there is a norm. Mutates `out`.

        Args:
            x: [n, n_in], contiguous, at most MAX_ROWS rows.
            out: [n, n_out], contiguous.
        """
        _operator(x, self.weight, self.bias, self.gain, self.sums, False, False, out)

    def gelu(self, x: Tensor, out: Tensor) -> None:
        """The same through GELU (exact, by the error function)."""
        _operator(x, self.weight, self.bias, self.gain, self.sums, True, False, out)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += the product, rounded once. No program reads what another one writes."""
        _operator(x, self.weight, self.bias, self.gain, self.sums, False, True, out)


def outer_block(n_out: int) -> int:
    """Outputs of a program: as many as leave PROGRAMS programs, or the fewest there may be."""
    return next((size for size in OUTER_BLOCKS if n_out >= size * PROGRAMS), OUTER_BLOCKS[-1])


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    sums: Tensor | None,
    gelu: bool,
    add: bool,
    out: Tensor,
) -> None:
    rows = x.float()
    fed = rows if gain is None else rows * gain.float()
    y = fed.to(weight.dtype).float() @ weight.float().t()
    if sums is not None:
        mean = rows.mean(-1, keepdim=True)
        variance = rows.square().mean(-1, keepdim=True) - mean.square()
        y = (y - mean * sums) * torch.rsqrt(variance.clamp_(min=0) + LAYER_NORM_EPS)
    if bias is not None:
        y = y + bias.float()
    if gelu:
        y = F.gelu(y)
    out.copy_(out.float() + y if add else y)


_operator = define(
    "few_rows",
    writes=("out",),
    cuda=launcher("cluster.common.kernels.gpu.product_kernel"),
    cpu=_plain,
)
