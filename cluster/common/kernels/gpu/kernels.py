"""Which of our Triton kernels this machine can run, and how they are reached.

Each kernel stands in a module of its own, `..._kernel.py`, whose `launch` has the arguments of the
operator that it computes on a GPU (`common.model.operators`). Beside it stands the module that
defines the operator: it has the plain twin, by torch's operations, that a CPU computes and that the
kernel is tested against. An operator writes where it is told, allocates nothing, and asks the host
for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

Launch = Callable[..., None]


@cache
def has_triton() -> bool:
    """Whether Triton loads here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def launcher(module: str, name: str = "launch") -> Launch:
    """A kernel's `launch`, whose module is imported by its first call: it needs Triton."""

    def launch(*args: Any) -> None:
        _launch_of(module, name)(*args)

    return launch


@cache
def _launch_of(module: str, name: str) -> Launch:
    launch: Launch = getattr(importlib.import_module(module), name)
    return launch
