"""The order of a simulated GPU's work: streams, events, waits and graphs.

Streams, events and the host have vector clocks; the host's threads count as one. Implicit waits, of
copies from pageable memory and of torch before a capture, order nothing here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cluster.common.model import streams
from cluster.common.model.streams import Body, CudaRuntime
from tests.support.gpu.capture import Capture, Recorded
from tests.support.gpu.device import SimulatedGpu
from tests.support.gpu.operations import Operation, where_now
from tests.support.gpu.tensor import CUDA, DeviceTensor

Clock = dict[int, int]  # by a stream's number, up to which of its operations


class SimulatedStream:
    def __init__(self, runtime: SimulatedRuntime, number: int) -> None:
        self.number = number
        self.clock: Clock = {number: 0}
        self.device = CUDA
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"stream {self.number}" if self.number else "the default stream"

    def wait_event(self, event: SimulatedEvent) -> None:
        with self._runtime.fence():
            join(self.clock, event.clock)

    def wait_stream(self, stream: SimulatedStream) -> None:
        with self._runtime.fence():
            join(self.clock, stream.clock)


class SimulatedEvent:
    """Nothing was recorded yet: whoever waits for it goes on at once."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self.clock: Clock = {}
        self._runtime = runtime

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.clock = dict((stream or self._runtime.current_stream(None)).clock)

    def synchronize(self) -> None:
        with self._runtime.fence():
            join(self._runtime.host, self.clock)

    def query(self) -> bool:
        """Always done when the host asks, who knows that from here on."""
        self.synchronize()
        return True


class SimulatedRuntime(CudaRuntime):
    """graphs: the replays of all that were captured."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        gpu.around = lambda: nullcontext() if self.capturing is None else self.capturing.inside
        self.host: Clock = {}
        self.graphs: list[Body] = []
        self._numbers = itertools.count()
        self._streams = [SimulatedStream(self, next(self._numbers))]
        self._local = threading.local()

    @contextmanager
    def fence(self) -> Iterator[None]:
        if (capture := self.capturing) is not None:
            capture.refuse("waits for work of another stream or of the device", where_now())
        with self.gpu.lock:
            yield

    def launched(self) -> tuple[SimulatedStream, int]:
        """The place of an operation that is launched now, and what it comes after: its stream."""
        stream = self.current_stream(None)
        join(stream.clock, self.host)
        stream.clock[stream.number] += 1
        return stream, stream.clock[stream.number]

    def host_waits(self) -> None:
        join(self.host, self.current_stream(None).clock)

    @property
    def capturing(self) -> Capture | None:
        return getattr(self._local, "capture", None)

    @property
    def is_recording(self) -> bool:
        """Whether what is launched runs only when it is replayed."""
        return (capture := self.capturing) is not None and not capture.is_replay

    # What the product calls.

    def new_stream(self, device: torch.device, priority: int) -> Any:
        self._streams.append(SimulatedStream(self, next(self._numbers)))
        return self._streams[-1]

    def new_event(self, blocking: bool) -> Any:
        return SimulatedEvent(self)

    @contextmanager
    def _on(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current_stream(None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def on_stream(self, stream: Any) -> Any:
        return self._on(stream)

    def current_stream(self, device: torch.device | None) -> Any:
        return getattr(self._local, "stream", self._streams[0])

    def default_stream(self, device: torch.device | None) -> Any:
        return self._streams[0]

    def synchronize(self, device: torch.device | None) -> None:
        with self.fence():
            for stream in self._streams:
                join(self.host, stream.clock)

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).pin_memory()

    def new_graph_memory(self) -> Any:
        return DeviceTensor.of(torch.zeros(1))  # every replay writes to it

    def capture(self, body: Body, memory: Any) -> Body:
        assert self.current_stream(None) is not self._streams[0], "a capture on the default stream"
        recorded = self._run(Capture(self.gpu), body)

        def replay() -> None:
            assert self.capturing is None, "a graph is replayed while another is captured"
            recorded.check_alive()
            self.gpu.touch("a graph's replay", (), (memory,))
            self._run(Capture(self.gpu, recorded), body)

        self.graphs.append(replay)
        return replay

    def _run(self, capture: Capture, body: Body) -> Recorded:
        self._local.capture = capture
        stream = self.current_stream(None)

        def watch(operation: Operation) -> None:
            if self.capturing is capture:  # another thread may do what it likes
                if self.current_stream(None) is not stream:
                    capture.refuse("launches on another stream", operation.where)
                capture.see(operation)

        self.gpu.watchers.append(watch)
        try:
            body()
            return capture.finish()
        finally:
            self.gpu.watchers.remove(watch)
            self._local.capture = None


@contextmanager
def simulated_gpu(values: str = "cpu") -> Iterator[tuple[SimulatedGpu, SimulatedRuntime]]:
    gpu = SimulatedGpu(values)
    runtime = SimulatedRuntime(gpu)
    with gpu.opened(), streams.replaced_by(runtime):
        yield gpu, runtime


def join(clock: Clock, other: Clock) -> None:
    """What comes after `other` comes after all that it comes after."""
    for number, position in other.items():
        clock[number] = max(clock.get(number, 0), position)
