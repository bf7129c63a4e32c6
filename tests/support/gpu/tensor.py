"""Tensors that say they are on `cuda:0`, and how calls on them come to the simulated GPU.

A build of torch without CUDA asks for CUDA's device in places that no dispatch goes through; those
that the product comes to are replaced while a simulated GPU is open (`replaced`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gpu.operations import each_tensor

CUDA = torch.device("cuda:0")
aten = torch.ops.aten


class Device(Protocol):
    is_in_kernel: bool

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def touch_on_host(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None: ...


class DeviceTensor(Tensor):
    """Looks like a tensor on `cuda:0`; its values are a plain tensor, on the same storage."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: Tensor

    @staticmethod
    def of(plain: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_subclass(DeviceTensor, plain)
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _open_gpu().dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def data_ptr(self) -> int:
        return self.plain.data_ptr() or id(self.plain.untyped_storage())

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            named = [x for x in args if isinstance(x, str | torch.device | int)]
            device = kwargs.get("device") or (torch.device(named[0]) if named else CUDA)
            kinds = [x for x in args if isinstance(x, torch.dtype)]
            dtype = kwargs.get("dtype") or (kinds[0] if kinds else self.dtype)
        options = {
            name: kwargs.get(name, False) for name in ("non_blocking", "copy") if name in kwargs
        }
        return _open_gpu().dispatch(aten.to.device, (self, torch.device(device), dtype), options)

    def cpu(self, *args: Any) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        gpu = _open_gpu()
        return self.plain.tolist() if gpu.is_in_kernel else self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


class Mode(TorchDispatchMode):
    """Brings calls without any tensor of the device, such as those that make one, to the GPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and asking loads the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _open_gpu().dispatch(func, args, kwargs or {})


_gpu: Device | None = None


def _open_gpu() -> Device:
    assert _gpu is not None, "a tensor of a simulated GPU that was closed"
    return _gpu


@contextmanager
def replaced(gpu: Device, run: Callable[..., None]) -> Iterator[None]:
    """While open, `gpu` is the device, in every thread; `run` begins a new thread on it."""
    global _gpu
    assert _gpu is None, "one at a time"
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(threading.Thread, "run", run))
        enter(patch.object(torch.cuda, "_lazy_init", lambda: None))
        enter(patch.object(torch.cuda, "is_available", lambda: True))
        enter(patch.object(torch, "tensor", _tensor))
        enter(patch.object(Tensor, "to", _to))
        for name in ("numpy", "tolist"):
            enter(patch.object(Tensor, name, _host_access(getattr(Tensor, name))))
        _gpu = gpu
        try:
            yield
        finally:
            _gpu = None


_make_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """torch's own, for a tensor of the device, asks for CUDA before it comes by us."""
    on_host = _make_tensor(data, **options)
    return on_host if device is None else on_host.to(device)


_to_of_torch = Tensor.to


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's own asks another tensor for its device past us."""
    if args and isinstance(args[0], DeviceTensor):
        return _to_of_torch(tensor, CUDA, args[0].dtype, *args[1:], **kwargs)
    return _to_of_torch(tensor, *args, **kwargs)


def _host_access(method: Callable[..., Any]) -> Callable[..., Any]:
    """The host reads values past torch's dispatcher, or gets memory to write to."""

    def told(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _gpu is not None and not _gpu.is_in_kernel:
            name = method.__name__
            _gpu.touch_on_host(name, [tensor], [tensor] if name == "numpy" else [])
        return method(tensor, *args, **kwargs)

    return told


def device_of(tensor: Tensor) -> torch.device:
    return CUDA if isinstance(tensor, DeviceTensor) else torch.device("cpu")


def plain_of(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, DeviceTensor) else tensor


def all_plain(values: Any) -> Any:
    return each_tensor(values, plain_of)


def as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def all_meta(values: Any) -> Any:
    """Tensors of the host go along as shapes; numbers in tensors stay."""
    return each_tensor(
        values, lambda x: x if x.device.type == "meta" or not x.dim() else as_meta(x)
    )
