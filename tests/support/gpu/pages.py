"""Which rows of memory an operation touches: of a pool those that its table of pages names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tests.support.gpu.device import SimulatedGpu
from tests.support.gpu.operations import Operation
from tests.support.gpu.tensor import plain_of

aten = torch.ops.aten
Touched = Iterator[tuple[Tensor, Iterable[int]]]


def rows_read(gpu: SimulatedGpu, operation: Operation) -> Touched:
    return _rows(gpu, operation, operation.reads)


def rows_written(gpu: SimulatedGpu, operation: Operation) -> Touched:
    return _rows(gpu, operation, operation.writes)


def _rows(gpu: SimulatedGpu, operation: Operation, tensors: Iterable[Tensor]) -> Touched:
    named = _named_pages(gpu, operation)
    for tensor in tensors:
        found = named.get(id(tensor))
        yield tensor, gpu.rows_of(tensor) if found is None else found


def _named_pages(gpu: SimulatedGpu, operation: Operation) -> dict[int, set[int]]:
    """By the id of a tensor that is indexed by rows, those rows."""
    if operation.func is None or gpu.values == "meta":
        return {}
    name, args = operation.func._schema.name, operation.args
    if name == "splitscribe::attend_pages" or name == "splitscribe::attend_pages_into":
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
    """Pages of all entries but inert ones: rows that fill up a batch attend to a single position of
    any page, perhaps while it is written, and nobody reads what they give.
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
