"""Compile, before any worker starts, what the workers of a CPU compute with.

What is compiled is kept in numba's cache, for the processor that this runs on: workers there, of
this installation, then only load it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.common.settings import DType

DTYPES: tuple[DType, ...] = ("auto", "float32", "int8")  # of either role on a CPU
LONGEST_S = 600.0  # on cores that other processes have


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels of one role, for one set of dtypes.

    took_s: until they were compiled or loaded. None: that failed, and torch's operations remain.
    """

    name: str
    took_s: float | None


def compile_kernels(dtypes: tuple[DType, ...] = DTYPES) -> Iterator[Compiled]:
    """Compile one after another what workers compute with here, or load it where it is kept."""
    done = set()
    for begin in _builds(dtypes):
        began_s = time.monotonic()
        kernels = begin()
        name = f"{kernels.name} {kernels.variant}".strip()
        built = kernels.wait(LONGEST_S)
        if name not in done:
            yield Compiled(name, None if built is None else time.monotonic() - began_s)
        done.add(name)


def _builds(dtypes: tuple[DType, ...]) -> Iterator[Callable[[], Any]]:
    import torch

    from cluster.common.model.device import resolve_dtype
    from cluster.common.model.weights import TORCH_DTYPES
    from decoder_worker.cpu import compiled as decoder
    from encoder_worker.cpu.compiled import team_kernels

    for dtype in dtypes:
        computes_in = TORCH_DTYPES[resolve_dtype(dtype, "cpu")]
        int8 = dtype == "int8"
        yield partial(team_kernels, computes_in, int8=int8)
        yield from decoder.all_builds(bfloat16=computes_in == torch.bfloat16, int8=int8)
