"""Finds accesses on a simulated GPU that nothing puts in order.

After the ideas of `torch.cuda._sanitizer`, and beyond them: memory is told apart by rows (a pool's
by pages), the host's accesses to pinned memory count, page tables are followed to the pages that
they name, and memory that is freed must not be in use by a stream that its allocator does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from tests.support.gpu.device import Memory, SimulatedGpu
from tests.support.gpu.operations import Kind, Operation
from tests.support.gpu.pages import rows_read, rows_written
from tests.support.gpu.runtime import Clock, SimulatedRuntime, SimulatedStream

HOST = -1


@dataclass(frozen=True, slots=True)
class Access:
    """By a stream's `position`-th operation, or the host's."""

    stream: int
    position: int
    what: str
    where: str

    def __str__(self) -> str:
        by = {HOST: "the host", 0: "the default stream"}.get(self.stream, f"stream {self.stream}")
        return f"{self.what} by {by} at {self.where}"


@dataclass(slots=True)
class _Row:
    """Of memory: who wrote it last, and who has read it since."""

    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


class RaceDetector:
    """races: what was found, each once."""

    def __init__(self, gpu: SimulatedGpu, runtime: SimulatedRuntime) -> None:
        self.races: dict[str, None] = {}
        self._gpu = gpu
        self._runtime = runtime
        gpu.watchers.append(self._see)
        gpu.on_free.append(self._freed)

    def __str__(self) -> str:
        return "\n".join(self.races)

    def _see(self, operation: Operation) -> None:
        if self._runtime.is_recording:
            return
        if operation.kind in (Kind.HOST, Kind.PIN):
            self._check(operation, HOST, 0, self._runtime.host)
            return
        stream, position = self._runtime.launched()
        for tensor in operation.made:
            memory = self._gpu.memory_of(tensor)
            memory.notes.setdefault("stream", stream)
            memory.notes["of a graph"] = self._runtime.capturing is not None
        self._check(operation, stream.number, position, stream.clock)
        if operation.blocking and operation.kind is Kind.TO_HOST:  # the host has its values
            self._runtime.host_waits()

    def _check(self, operation: Operation, stream: int, position: int, clock: Clock) -> None:
        read = Access(stream, position, "read", operation.where)
        for tensor, rows in rows_read(self._gpu, operation):
            for row in self._rows(tensor, rows):
                self._ordered(row.write, read, clock, tensor)
                row.reads[stream] = read
        write = Access(stream, position, "written", operation.where)
        for tensor, rows in rows_written(self._gpu, operation):
            for row in self._rows(tensor, rows):
                for earlier in (row.write, *row.reads.values()):
                    self._ordered(earlier, write, clock, tensor)
                row.write, row.reads = write, {}

    def _rows(self, tensor: Tensor, rows: Iterable[int]) -> list[_Row]:
        memory = self._gpu.memory_of(tensor)
        known: dict[int, _Row] = memory.notes.setdefault("rows", {})
        return [known.setdefault(row, _Row()) for row in rows]

    def _ordered(self, earlier: Access | None, later: Access, clock: Clock, tensor: Tensor) -> None:
        if earlier is None or earlier.stream in (HOST, later.stream):
            return
        if clock.get(earlier.stream, 0) >= earlier.position:
            return
        made = self._gpu.memory_of(tensor).where
        self.races[f"{later}\n  not after it is {earlier}\n  (memory of {made})"] = None

    def _freed(self, memory: Memory) -> None:
        """Whoever allocates next on its stream gets it."""
        owner: SimulatedStream | None = memory.notes.get("stream")
        if owner is None or memory.notes.get("of a graph"):
            return
        for row in memory.notes.get("rows", {}).values():
            for access in (row.write, *row.reads.values()):
                if access is None or access.stream in (HOST, owner.number):
                    continue
                reached = max(
                    clock.get(access.stream, 0) for clock in (owner.clock, self._runtime.host)
                )
                if reached < access.position:
                    self.races[
                        f"memory of {memory.where} is free for {owner}\n  not after it is {access}"
                    ] = None
