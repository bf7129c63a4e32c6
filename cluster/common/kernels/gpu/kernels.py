"""Our own kernels on a GPU: how they become operators of torch's, and how they are reached.

Such a kernel, Triton's or a library's, gets its tensors past torch's dispatcher: nobody can tell
what it reads and writes. As an operator it has a schema that says so, a kernel for CUDA, one for
the CPU that computes the same by torch, which the other is tested against, and one that knows
shapes only. What checks graphs and streams without a GPU (`tests/support/gpu`) goes by that. A call
costs about 3 microseconds more (`torch.library.custom_op`: 18), and nothing in a replayed graph.

Triton's kernels stand in modules of their own, each with a `launch_...` that has the operator's
arguments; the module that defines the operator does not import Triton. An operator writes where it
is told, allocates nothing, and asks the host for nothing.
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

# Operators live as long as it does.
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
    """Define an operator, once in a process.

    Args:
        writes: the tensors among its parameters that are written; what is returned is new memory.
        cuda: launches the kernel on the current stream and waits for nothing.
        cpu: the same by torch, on tensors of the CPU; its signature is the operator's.
        shapes: returns what `cpu` returns, of those shapes and without values.

    Returns:
        What calls it.
    """
    schema = torch.library.infer_schema(cpu, mutates_args=writes).replace("SymInt", "int")
    _library.define(name + schema)  # type: ignore[no-untyped-call]
    for function, key in ((cuda, "CUDA"), (cpu, "CPU"), (shapes, "Meta")):
        _library.impl(name, function, key)  # type: ignore[no-untyped-call]
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def has_triton() -> bool:
    """Whether our kernels are used: Triton loads here, and they were not found wrong at start."""
    return KERNELS not in turned_off and loads_triton()


@cache
def loads_triton() -> bool:
    """Whether Triton loads here, and with a GPU can compile what each launch goes through.

    It compiles that with the machine's C compiler against Python's headers, once in a process.
    """
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
    """A kernel's `launch_...`, whose module is imported by its first call: it needs Triton."""

    @cache
    def load() -> Callable[..., None]:
        launch: Callable[..., None] = getattr(importlib.import_module(module), name)
        return launch

    return lambda *args: load()(*args)
