"""A simulated GPU: tensors on `cuda:0` on a machine without one, in any thread.

A tensor's values lie on the CPU, or nowhere (`values="meta"`: shapes alone). Each operation is
told to the watchers: what it reads and writes, whether it copies between device and host, and its
place in the product. torch's own fake tensors cannot be indexed without CUDA and have no values.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.gpu.operations import (
    Kind,
    Operation,
    Watcher,
    accesses,
    each_tensor,
    named_arguments,
    tensors_in,
    where_now,
)
from tests.support.gpu.tensor import (
    DeviceTensor,
    Mode,
    all_meta,
    all_plain,
    as_meta,
    device_of,
    plain_of,
    replaced,
)

aten = torch.ops.aten

_PINS = {aten.pin_memory.default, aten._pin_memory.default}
_CONVERSIONS = {
    *(getattr(aten.to, name) for name in ("dtype_layout", "device", "dtype", "other")),
    aten._to_copy.default,
}
_READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.allclose.default,
}
_BY_CPU = {  # what a CPU has no kernel for
    aten.mm.dtype: lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
}
_TAKES_HOST_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class MixedDevicesError(AssertionError):
    pass


@dataclass(eq=False)
class Memory:
    number: int
    where: str
    n_rows: int  # of the tensor that it was made for: what is told apart in it
    row_bytes: int
    pinned: bool = False
    storage: Any = None  # a weak reference
    notes: dict[str, Any] = field(default_factory=dict)  # of those who watch


class SimulatedGpu:
    """One device. `values`: "cpu", or "meta" for shapes alone."""

    def __init__(self, values: str = "cpu") -> None:
        self.values = values
        self.watchers: list[Watcher] = []
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext  # each kernel
        self.on_free: list[Callable[[Memory], None]] = []
        self.lock = threading.RLock()
        self._memory: dict[int, Memory] = {}  # by the storage's id
        self._n_made = 0
        self._local = threading.local()
        self._is_open = False

    # What a tensor's memory is.

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = plain_of(tensor).untyped_storage()
        found = self._memory.get(id(storage))
        return self._add(tensor, "memory that was there before") if found is None else found

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self._memory.get(id(plain_of(tensor).untyped_storage()))
        return found is not None and found.pinned

    def rows_of(self, tensor: Tensor) -> range:
        memory, plain = self.memory_of(tensor), plain_of(tensor)
        if memory.n_rows == 1 or not plain.numel():
            return range(memory.n_rows if plain.numel() else 0)
        spans = zip(plain.shape, plain.stride(), strict=True)
        first = plain.storage_offset() * plain.itemsize
        last = first + sum((n - 1) * stride for n, stride in spans) * plain.itemsize
        return range(first // memory.row_bytes, last // memory.row_bytes + 1)

    def _add(self, tensor: Tensor, where: str, pinned: bool = False) -> Memory:
        plain = plain_of(tensor)
        storage = plain.untyped_storage()
        n_rows = plain.shape[0] if plain.dim() > 1 and 1 < plain.shape[0] <= 256 else 1
        self._n_made += 1
        memory = Memory(
            self._n_made,
            where,
            n_rows,
            max(1, plain.numel() // max(1, n_rows) * plain.itemsize),
            pinned,
            weakref.ref(storage),
        )
        self._memory[id(storage)] = memory
        weakref.finalize(storage, self._forget, id(storage)).atexit = False
        return memory

    def _forget(self, key: int) -> None:
        memory = self._memory.pop(key)
        if self._is_open and not memory.pinned:
            for freed in self.on_free:
                freed(memory)

    # Running.

    @contextmanager
    def opened(self) -> Iterator[SimulatedGpu]:
        """While open, "cuda" is this device, in every thread that begins meanwhile and in this."""
        run = threading.Thread.run
        gpu = self

        def run_on_it(thread: threading.Thread) -> None:
            with gpu.in_thread():
                run(thread)

        self._is_open = True
        try:
            with replaced(self, run_on_it), self.in_thread():
                yield self
        finally:
            self._is_open = False

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") comes by us
        try:
            # Without gradients composite operations come as they are called: taken apart by torch,
            # some would ask for CUDA's device.
            with torch.inference_mode(), Mode():
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)

    @contextmanager
    def in_kernel(self) -> Iterator[None]:
        """What this thread does meanwhile belongs to one operation and is told to nobody."""
        before = self.is_in_kernel
        self._local.in_kernel = True
        try:
            yield
        finally:
            self._local.in_kernel = before

    @property
    def is_in_kernel(self) -> bool:
        return getattr(self._local, "in_kernel", False)

    def tell(self, operation: Operation) -> None:
        with self.lock:
            for watcher in tuple(self.watchers):
                watcher(operation)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        on_device = any(isinstance(x, DeviceTensor) for x in tensors)
        if self.is_in_kernel:
            return func(*all_plain(args), **all_plain(kwargs))
        if func in _PINS:
            return args[0] if self.is_pinned(args[0]) else self._as_pinned(args[0].clone())
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func in _CONVERSIONS:
            return self._convert(func, args, kwargs)
        if func is aten.copy_.default and isinstance(args[0], DeviceTensor) != isinstance(
            args[1], DeviceTensor
        ):
            return self._copy(*args, **kwargs)
        asked = kwargs.get("device")
        to_device = on_device if asked is None else torch.device(asked).type == "cuda"
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs, tensors)
        return self._on_device(func, args, kwargs, tensors)

    def _on_device(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        strangers = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]
        if strangers and func not in _TAKES_HOST_INDICES:
            raise MixedDevicesError(
                f"{func} at {where_now()} takes tensors of device and host at once"
            )
        options = all_plain(kwargs)
        if options.get("device") is not None:
            options["device"] = self.values
        plain_args = all_plain(args)
        if self.values == "meta":
            plain_args, options = all_meta(plain_args), all_meta(options)
        reads, writes = accesses(func, args, kwargs)
        if func in _READ_BY_HOST and self.values == "meta":
            found: Any = 0
        else:
            run = func if self.values == "meta" else _BY_CPU.get(func, func)
            with self.in_kernel(), self.around():
                found = run(*plain_args, **options)
        same = {id(plain_of(x)): x for x in writes}
        made: list[Tensor] = []
        outputs = list(tensors_in(found))
        aliased = [x for x in outputs if id(x.untyped_storage()) in self._memory]
        with self.lock:
            for x in outputs:
                if id(x) not in same and id(x.untyped_storage()) not in self._memory:
                    self._add(x, where_now())
                    made.append(x)
        wrapped = each_tensor(found, lambda x: same[id(x)] if id(x) in same else DeviceTensor.of(x))
        if writes or made or not aliased or func in _READ_BY_HOST:  # else it made a view
            to_host = func in _READ_BY_HOST
            self.tell(
                Operation(
                    str(func),
                    Kind.TO_HOST if to_host else Kind.TO_DEVICE if strangers else Kind.KERNEL,
                    where_now(),
                    tuple(x for x in reads if isinstance(x, DeviceTensor)),
                    (*writes, *made),
                    tuple(made),
                    blocking=to_host or bool(strangers),
                    func=func,
                    args=args,
                    kwargs=kwargs,
                )
            )
        return wrapped

    def _on_host(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        pin = bool(kwargs.get("pin_memory"))
        found = func(*args, **({**kwargs, "pin_memory": False} if pin else kwargs))
        if pin:
            return self._as_pinned(found)
        if any(self.is_pinned(x) for x in tensors):
            reads, writes = accesses(func, args, kwargs)
            outputs = list(tensors_in(found))
            if writes or not any(self.is_pinned(x) for x in outputs):  # else it made a view
                self.touch_on_host(str(func), reads, writes)
        return found

    def touch_on_host(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Tell of the host's accesses; those of memory that is not pinned concern nobody."""
        kept = [tuple(x for x in some if self.is_pinned(x)) for some in (reads, writes)]
        if any(kept):
            self.tell(Operation(name, Kind.HOST, where_now(), *kept))

    def touch(self, name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...] = ()) -> None:
        """Tell of a kernel's accesses that no argument of its operator shows."""
        self.tell(Operation(name, Kind.KERNEL, where_now(), reads, writes))

    def _as_pinned(self, tensor: Tensor) -> Tensor:
        with self.lock:
            self._add(tensor, where_now(), pinned=True)
        self.tell(Operation("pin_memory", Kind.PIN, where_now(), writes=(tensor,)))
        return tensor

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = named_arguments(func, args, kwargs)
        tensor, other = given["self"], given.get("other")
        device = device_of(tensor)
        if other is not None:
            target, dtype = device_of(other), other.dtype
        else:
            asked = given.get("device")
            target = device if asked is None else torch.device(asked)
            dtype = given.get("dtype") or tensor.dtype
        must_copy = func is aten._to_copy.default or given.get("copy")
        if target.type == device.type:
            if dtype == tensor.dtype and not must_copy:
                return tensor
            options = {"dtype": dtype, "memory_format": given.get("memory_format")}
            run = self._on_device if isinstance(tensor, DeviceTensor) else self._on_host
            return run(aten._to_copy.default, (tensor,), options, [tensor])
        if dtype != tensor.dtype:  # converted where it is, as CUDA does before a copy
            tensor = self.dispatch(aten._to_copy.default, (tensor,), {"dtype": dtype})
        made: tuple[Tensor, ...] = ()
        if target.type == "cuda":
            plain = tensor.clone() if self.values == "cpu" else as_meta(tensor)
            with self.lock:
                self._add(plain, where_now())
            moved: Tensor = DeviceTensor.of(plain)
            made = (moved,)
        elif self.values == "cpu":
            moved = plain_of(tensor).clone()
        else:
            moved = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self._tell_copy(moved, tensor, bool(given.get("non_blocking")), made)
        return moved

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.values == "cpu":
            plain_of(target).copy_(plain_of(source))
        self._tell_copy(target, source, non_blocking)
        return target

    def _tell_copy(
        self, target: Tensor, source: Tensor, non_blocking: bool, made: tuple[Tensor, ...] = ()
    ) -> None:
        up = isinstance(target, DeviceTensor)
        host = source if up else target
        seen = self.is_pinned(host)
        # From pageable memory a copy is staged before the call returns, and waits for the stream.
        blocking = not (non_blocking and (seen or not up))
        self.tell(
            Operation(
                "copy",
                Kind.TO_DEVICE if up else Kind.TO_HOST,
                where_now(),
                (source,) if seen or not up else (),
                (target,) if seen or up else (),
                made,
                blocking,
            )
        )
