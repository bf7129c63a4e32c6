"""Defines operators of ours, so that torch sees what a kernel that is not torch's does.

Such a kernel, Triton's or a library's, gets its tensors past torch's dispatcher: nobody can tell
what it reads and writes. As an operator it has a schema that says so, a kernel for CUDA, one for
the CPU that computes the same by torch, and one that knows shapes only. What checks graphs and
streams without a GPU (`tests/support/gpu`) goes by that. A call costs about 3 microseconds more
(`torch.library.custom_op`: 18), and nothing in a replayed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "splitscribe"

# Operators live as long as it does.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    name: str,
    *,
    writes: Sequence[str] = (),
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    shapes: Callable[..., Any],
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
    _library.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    _library.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def nothing(*tensors: Any) -> None:
    """The `shapes` of an operator that returns nothing."""
