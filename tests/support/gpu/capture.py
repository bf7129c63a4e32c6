"""What a CUDA graph's capture refuses, seen operation by operation on a simulated GPU.

Refused are copies between device and host, pinned memory, values on the host, waits, another
stream, and memory that outlives the capture. A replay runs the captured function again and
compares.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gpu.device import Memory, SimulatedGpu
from tests.support.gpu.operations import Kind, Operation, where_now

_FORBIDDEN = {
    Kind.TO_HOST: "copies from the device to the host",
    Kind.TO_DEVICE: "copies from the host to the device",
    Kind.HOST: "reads or writes pinned memory of the host",
    Kind.PIN: "allocates pinned memory of the host",
}
_TAGS = {
    torch.Tag.dynamic_output_shape: "has a shape that depends on values",
    torch.Tag.data_dependent_output: "asks the host to look at values",
}
aten = torch.ops.aten
_INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)

Step = tuple[Any, ...]


class CaptureError(AssertionError):
    """Not a RuntimeError, after which the encoder would go on without a graph."""


class Recorded:
    def __init__(self, steps: list[Step], found: dict[int, Memory]) -> None:
        self.steps = steps
        self._found = found

    def check_alive(self) -> None:
        for memory in self._found.values():
            if memory.storage() is None:
                raise CaptureError(f"a graph reads memory that is gone: made at {memory.where}")


class Capture:
    """One run of a captured function; `like`: what it did when it was captured."""

    def __init__(self, gpu: SimulatedGpu, like: Recorded | None = None) -> None:
        self.is_replay = like is not None
        self._gpu = gpu
        self._like = like
        self._steps: list[Step] = []
        self._own: dict[int, Memory] = {}
        self._found: dict[int, Memory] = {}

    def see(self, operation: Operation) -> None:
        if operation.kind is not Kind.KERNEL:
            self.refuse(_FORBIDDEN[operation.kind], operation.where, operation.name)
        for tensor in operation.made:
            memory = self._gpu.memory_of(tensor)
            self._own[memory.number] = memory
        for tensor in (*operation.reads, *operation.writes):
            memory = self._gpu.memory_of(tensor)
            if memory.number not in self._own:
                self._found[memory.number] = memory
        step = (operation.name, *map(self._key, (*operation.reads, *operation.writes)))
        self._steps.append(step)
        if self._like is not None:
            place = len(self._steps) - 1
            captured = self._like.steps[place] if place < len(self._like.steps) else None
            if step != captured:
                raise CaptureError(
                    f"{operation.where}: {operation.name} is not what was captured: "
                    f"{step}, captured {captured}"
                )

    def refuse(self, why: str, where: str, name: str = "") -> NoReturn:
        what = f" ({name})" if name else ""
        raise CaptureError(f"{where}: {why}{what}, which a graph's capture refuses")

    def finish(self) -> Recorded:
        left = [memory for memory in self._own.values() if memory.storage() is not None]
        if left:
            gc.collect(1)
            left = [memory for memory in left if memory.storage() is not None]
        if left:
            self.refuse("allocates memory that outlives the captured function", left[0].where)
        if self._like is not None and len(self._steps) != len(self._like.steps):
            raise CaptureError(
                f"a replay has {len(self._steps)} operations, its capture {len(self._like.steps)}"
            )
        return Recorded(self._steps, self._found)

    def _key(self, tensor: Tensor) -> Step:
        """What a graph holds of an argument: an address, where it was not allocated inside."""
        number = self._gpu.memory_of(tensor).number
        known = "own" if number in self._own else number
        return (known, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def inside(self) -> AbstractContextManager[object]:
        """While open, what composite operations are made of is looked at too."""
        return nullcontext() if self.is_replay else _Parts(self)


class _Parts(TorchDispatchMode):
    """Takes composite operations apart, and refuses the parts that need values on the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and asking loads the compiler

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tags = func.tags
        if func in _INDEXED:
            masked = any(x is not None and x.dtype == torch.bool for x in args[1])
            tags = [torch.Tag.dynamic_output_shape] if masked else []
        for tag, why in _TAGS.items():
            if tag in tags:
                self._capture.refuse(why, where_now(), str(func))
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_composite(func: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
