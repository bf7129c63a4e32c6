"""CUDA's streams, events and graphs, which a test can replace by a simulated GPU.

Each role computes on a stream of its own, never on the default one, so that both can share a GPU
within one process; the decoder's short kernels have priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

ENCODE_PRIORITY = 0  # CUDA's lowest; a smaller number runs first
PROJECT_PRIORITY = 0  # of encoder states to KV, beside decode steps
DECODE_PRIORITY = -1

WARM_UPS = 2  # runs before a capture

Body = Callable[[], None]


class CudaRuntime:
    def new_stream(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]

    def new_event(self, blocking: bool) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def default_stream(self, device: torch.device | None) -> torch.cuda.Stream:
        return torch.cuda.default_stream(device)

    def synchronize(self, device: torch.device | None) -> None:
        torch.cuda.synchronize(device)

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True)

    def new_graph_memory(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, body: Body, memory: Any) -> Body:
        graph = torch.cuda.CUDAGraph()
        # Threads of the other role may use CUDA during the capture.
        with torch.cuda.graph(
            graph,
            pool=memory,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            body()
        return graph.replay


_runtime = CudaRuntime()


@contextmanager
def replaced_by(runtime: CudaRuntime) -> Iterator[None]:
    """Replace CUDA by `runtime` in all threads while the context is open. For tests."""
    global _runtime
    before, _runtime = _runtime, runtime
    try:
        yield
    finally:
        _runtime = before


def new_stream(device: torch.device | str, priority: int = 0) -> torch.cuda.Stream | None:
    device = torch.device(device)
    return _runtime.new_stream(device, priority) if device.type == "cuda" else None


def new_event(blocking: bool = False) -> torch.cuda.Event:
    """With `blocking`, a thread that waits for the event sleeps instead of spinning."""
    return _runtime.new_event(blocking)


def has_come(event: torch.cuda.Event) -> bool:
    """Whether the device has reached the event; does not wait."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else _runtime.on_stream(stream)


def default_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """Return the stream of threads that chose none, on which weights are loaded."""
    return _runtime.default_stream(device)


def synchronize(device: torch.device | str) -> None:
    """Wait for all work on `device`, on every stream. Does nothing on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        _runtime.synchronize(device)


def pinned(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return _runtime.pinned(values, dtype)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to `device`; to a GPU from pinned memory, without waiting for the copy."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return pinned(values, dtype).to(device, non_blocking=True)


def new_graph_memory() -> Any:
    """Return memory for graphs that never run at once and never read each other's results."""
    return _runtime.new_graph_memory()


def warm_up(body: Body) -> None:
    """Run `body` before its capture, so that libraries load, compile and allocate."""
    for _ in range(WARM_UPS):
        body()


def capture(body: Body, memory: Any) -> Body:
    """Capture `body` as a CUDA graph on the current stream, and return what replays it.

    The current stream must not be the default one. `body` may only launch work on tensors that stay
    where they are: no copy from or to the host, no shape that depends on values, no wait. Nothing
    that it allocates may be read once it has returned. `memory` comes from `new_graph_memory`.
    """
    return _runtime.capture(body, memory)
