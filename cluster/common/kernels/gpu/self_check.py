"""Check each fast path of a GPU at start: one that raises or is wrong beyond rounding is not used.

Each path computes random numbers in the served shapes, and torch's plain layers compute the same in
float32. A path that differs is turned off with one warning, and the next slower one is checked. A
fault that breaks the device, such as an access to a wrong address, still ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KERNELS = "our kernels"
GRAPHS = "CUDA graphs"
FLASHINFER = "flashinfer's attention"
TORCH = "torch's layers"
INSTEAD = {
    KERNELS: TORCH,
    GRAPHS: "launches by the host",
    FLASHINFER: "torch's attention",
    TORCH: "nothing",
}
ERROR = 0.05  # share of the float32 result's norm that rounding to 16 bits may take
LEAST = 1e-6  # smaller differences do not count

# The paths that this process never uses again, and why.
turned_off: dict[str, str] = {}

Compute = Callable[[], Sequence[Tensor]]


def is_right(way: str, compute: Compute, plain: Compute) -> bool:
    """Whether `compute` is right but for rounding; otherwise turn `way` off.

    `plain` returns as many tensors of the same shapes, of any device and dtype. Integers must be
    equal.
    """
    if way in turned_off:
        return False
    if why := _fault(way, compute, plain):
        turned_off[way] = why
        logger.warning("%s: not used on this GPU, but %s: %s", way, INSTEAD[way], why)
    return not why


def is_as_on_cpu(
    way: str, compute: Callable[..., Sequence[Tensor]], device: torch.device, *args: Any
) -> bool:
    """Compare what `compute` returns on `device` and on the CPU for copies of `args`."""

    def on(place: torch.device | str) -> Sequence[Tensor]:
        return compute(*(a.to(place, copy=True) if isinstance(a, Tensor) else a for a in args))

    return is_right(way, lambda: on(device), lambda: on("cpu"))


def _fault(way: str, compute: Compute, plain: Compute) -> str:
    expected = plain()
    try:
        for ours, exact in zip(compute(), expected, strict=True):
            here, whole = ours.to(exact.device), not exact.is_floating_point()
            if whole and not torch.equal(here, exact):
                return "it chooses otherwise than torch does"
            gap, norm = (here.float() - exact.float()).norm(), exact.float().norm()
            if not whole and not gap <= ERROR * norm + LEAST:  # NaN fails, too
                return f"it differs by {float(gap / norm):.3f} of what torch computes"
    except (AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of torch, Triton, a compiler, flashinfer
        return f"{type(error).__name__}: {error}"
    return ""


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def in_float32(part: Any, device: torch.device | str | None = None) -> Any:
    """Copy layers with all weights in float32, to `device` or where they are."""
    if isinstance(part, Tensor):
        return part.to(device or part.device, torch.float32)
    if isinstance(part, torch.dtype):
        return torch.float32
    if isinstance(part, tuple):
        return tuple(in_float32(one, device) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: in_float32(getattr(part, field.name), device) for field in fields(part)}
        return replace(part, **own)
    return part
