"""CUDA's streams, events and graphs of a role, and nothing at all on a CPU.

Each role computes on a stream of its own, never on the default one, so that both can share a GPU
within one process, where the decoder's short kernels go first. All that orders work on a GPU is
asked for here, so that a test can put a simulated GPU in CUDA's place (`replaced_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

ENCODE_PRIORITY = 0  # CUDA's lowest; smaller goes first
PROJECT_PRIORITY = 0  # of states into KV, beside decode steps
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
        # Other threads of the process, of the other role, may do with CUDA what they like.
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
    """While open, every thread's streams, events and graphs are those of `runtime`. For tests."""
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
    """blocking: who waits for it sleeps instead of spinning."""
    return _runtime.new_event(blocking)


def has_come(event: torch.cuda.Event) -> bool:
    """Whether the device has come to where an event was recorded; does not wait."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """While open, this thread's work goes to `stream`; does nothing for None."""
    return nullcontext() if stream is None else _runtime.on_stream(stream)


def default_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """Where the work of threads goes that chose no stream: weights are loaded there."""
    return _runtime.default_stream(device)


def synchronize(device: torch.device | str) -> None:
    """Wait for all that was launched on `device`, on any stream; nothing on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        _runtime.synchronize(device)


def pinned(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return _runtime.pinned(values, dtype)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values` on `device`; to a GPU from pinned memory, without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return pinned(values, dtype).to(device, non_blocking=True)


def new_graph_memory() -> Any:
    """For graphs of which never two run at once, and none reads what another left."""
    return _runtime.new_graph_memory()


def warm_up(body: Body) -> None:
    """Run what is to be captured, so that libraries load, compile and allocate before."""
    for _ in range(WARM_UPS):
        body()


def capture(body: Body, memory: Any) -> Body:
    """A CUDA graph of `body` on the current stream, not the default one: what replays it.

    It may only launch work for the device on tensors that stay where they are: no copy from or to
    the host, no shape that depends on values, no wait, and nothing that it allocates may be read
    once it has returned. memory: from `new_graph_memory`.
    """
    return _runtime.capture(body, memory)
