"""Finds accesses on a simulated GPU that nothing puts in order, after `torch.cuda._sanitizer`.

Beyond it, memory is told apart by rows or pages, page tables are followed, and the host's accesses
to pinned memory and the freeing of memory count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.gpu.device import Memory, SimulatedGpu
from tests.support.gpu.operations import Kind, Operation
from tests.support.gpu.runtime import Clock, SimulatedRuntime, SimulatedStream
from tests.support.gpu.tensor import plain_of

HOST = -1
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Access:
    stream: int
    position: int
    what: str
    where: str

    def __str__(self) -> str:
        by = {HOST: "the host", 0: "the default stream"}.get(self.stream, f"stream {self.stream}")
        return f"{self.what} by {by} at {self.where}"


@dataclass(slots=True)
class _Row:
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


class RaceDetector:
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
        named = _named_pages(self._gpu, operation)
        for tensor in operation.reads:
            for row in self._rows(tensor, named):
                self._ordered(row.write, read, clock, tensor)
                row.reads[stream] = read
        write = Access(stream, position, "written", operation.where)
        for tensor in operation.writes:
            for row in self._rows(tensor, named):
                for earlier in (row.write, *row.reads.values()):
                    self._ordered(earlier, write, clock, tensor)
                row.write, row.reads = write, {}

    def _rows(self, tensor: Tensor, named: dict[int, set[int]]) -> list[_Row]:
        memory = self._gpu.memory_of(tensor)
        rows = named.get(id(tensor), self._gpu.rows_of(tensor))
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


def _named_pages(gpu: SimulatedGpu, operation: Operation) -> dict[int, set[int]]:
    """By the id of a tensor that is indexed by rows, those rows."""
    if operation.func is None or gpu.values == "meta":
        return {}
    name, args = operation.func._schema.name, operation.args
    if name == "splitscribe::attend_pages":
        pages = _attended(*map(_values, args[3:6]))
        return {id(pool): _rows_of(gpu, pool, pages) for pool in args[1:3]}
    if name == "splitscribe::append_to_pages":
        _, _, entries, positions, k, v, indices, indptr, _ = args
        first, table = _values(indptr), _values(indices)
        places = zip(_values(entries), _values(positions), strict=True)
        appended = {table[first[entry] + position // k.shape[1]] for entry, position in places}
        return {id(pool): _rows_of(gpu, pool, appended) for pool in (k, v)}
    if name == "splitscribe::scatter_pages":
        written = {page for page in _values(plain_of(args[2]).flatten()) if page >= 0}
        return {id(args[1]): _rows_of(gpu, args[1], written)}
    if operation.func in (aten.index.Tensor, aten.index_put_.default):
        return _indexed(gpu, args[0], args[1][0] if args[1] else None)
    if operation.func is aten.index_copy_.default and args[1] == 0:
        return _indexed(gpu, args[0], args[2])
    return {}


def _rows_of(gpu: SimulatedGpu, pool: Tensor, pages: set[int]) -> set[int]:
    """By where the pages lie: what a kernel takes for pages may be parts of them."""
    plain = plain_of(pool)
    return {row for page in pages for row in gpu.rows_of(plain[page])}


def _attended(indptr: list[int], indices: list[int], last: list[int]) -> set[int]:
    """Pages of all entries but inert ones, which fill up a batch and attend to one position of any
    page.
    """
    pages: set[int] = set()
    for begin, end, length in zip(indptr, indptr[1:], last, strict=False):
        if end - begin > 1 or length > 1:
            pages.update(indices[begin:end])
    return pages


def _indexed(gpu: SimulatedGpu, tensor: Tensor, index: Tensor | None) -> dict[int, set[int]]:
    if index is None or index.dtype == torch.bool or tensor.storage_offset():
        return {}
    n_rows = gpu.memory_of(tensor).n_rows
    if n_rows != tensor.shape[0]:
        return {}
    return {id(tensor): {row % n_rows for row in _values(plain_of(index).flatten())}}


def _values(tensor: Tensor) -> list[int]:
    values: list[int] = plain_of(tensor).tolist()
    return values
