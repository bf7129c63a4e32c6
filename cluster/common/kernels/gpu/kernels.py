"""Define our own GPU kernels as operators of torch.

An operator has a schema of what it reads and writes, a kernel for CUDA, one for the CPU that
computes the same by torch, and one for shapes only; tests use all of them. A call costs 3
microseconds more (`torch.library.custom_op`: 18), and nothing in a replayed graph.

An operator allocates nothing and waits for nothing. Triton's kernels stand in modules of
their own, which the module that defines the operator does not import.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from cluster.common.kernels.gpu.self_check import KERNELS, turned_off

logger = logging.getLogger(__name__)

NAMESPACE = "splitscribe"

# Operators live as long as this library.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def nothing(*tensors: Any) -> None:
    """The `shapes` of an operator that returns nothing."""


def define(
    name: str,
    *,
    writes: Sequence[str] = (),
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    shapes: Callable[..., Any] = nothing,
) -> Callable[..., Any]:
    """Define an operator, once in a process, and return it.

    Args:
        writes: the parameters that it writes; what it returns is new memory.
        cuda: launches the kernel on the current stream and waits for nothing.
        cpu: computes the same by torch on the CPU; its signature is the operator's.
        shapes: returns what `cpu` returns, of those shapes and without values.
    """
    schema = torch.library.infer_schema(cpu, mutates_args=writes).replace("SymInt", "int")
    _library.define(name + schema)  # type: ignore[no-untyped-call]
    for function, key in ((cuda, "CUDA"), (cpu, "CPU"), (shapes, "Meta")):
        _library.impl(name, function, key)  # type: ignore[no-untyped-call]
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def has_triton() -> bool:
    """Whether our kernels are used: Triton loads, and the check at start found them right."""
    return KERNELS not in turned_off and loads_triton()


@cache
def loads_triton() -> bool:
    """Whether Triton can be imported and, with a GPU, compiles its launcher."""
    try:
        import triton.runtime
    except ImportError:
        return False
    try:
        if torch.cuda.is_available():
            _ = triton.runtime.driver.active.utils
    except Exception as error:
        logger.warning(
            "our GPU kernels are not used: Triton cannot compile its launcher. It needs a C "
            "compiler and Python's headers (packages gcc and python3-dev of Debian and Ubuntu): %s",
            error,
        )
        return False
    return True


def launcher(module: str, name: str) -> Callable[..., None]:
    """Return a kernel's `launch_...`; the first call imports its module, which needs Triton."""

    @cache
    def load() -> Callable[..., None]:
        launch: Callable[..., None] = getattr(importlib.import_module(module), name)
        return launch

    return lambda *args: load()(*args)
