"""What one call of torch's does on a simulated GPU, and where in the project it stands."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.gpu_kit.packages import ROOT

_OURS = str(Path(__file__).parent)
_PASSED_THROUGH = ("cluster/common/model/streams.py", "cluster/common/kernels/gpu/kernels.py")


class Kind(Enum):
    KERNEL = "computes on the device"
    HOST = "computes on the host, in pinned memory"
    TO_DEVICE = "copies from the host to the device"
    TO_HOST = "copies from the device to the host"
    PIN = "allocates pinned memory of the host"


@dataclass(frozen=True, slots=True)
class Operation:
    """Tensors of the device and pinned ones of the host. made: in newly allocated memory.

    blocking: the host waits for the device in it.
    """

    name: str
    kind: Kind
    where: str
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    blocking: bool = False
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Watcher = Callable[[Operation], None]


def where_now() -> str:
    """The line of the product, or of a test, that the calling thread is at."""
    root = str(ROOT)
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith(root) and not file.startswith(_OURS) and ".venv" not in file:
            short = file[len(root) + 1 :]
            if short not in _PASSED_THROUGH:
                return f"{short}:{line} in {frame.f_code.co_name}"
    return "outside of the project"


def accesses(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator's schema says it reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    given = named_arguments(func, args, kwargs)
    for argument in func._schema.arguments:
        info = argument.alias_info
        into = writes if info is not None and info.is_write else reads
        into += tensors_in(given.get(argument.name))
    return reads, writes


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """torch has its own way through nested arguments, which takes longer than a small operation."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


def each_tensor(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, tuple | list):
        return type(values)([each_tensor(value, change) for value in values])
    if isinstance(values, dict):
        return {name: each_tensor(value, change) for name, value in values.items()}
    return values
