"""flashinfer's calls as operators that say what they read and write (`common.model.operators`).

An operator takes tensors and numbers only, so a wrapper of flashinfer's, which holds a plan, is
registered here and named by a number. Whatever of the wrapper's a kernel reads or writes is an
argument beside it. Knows of flashinfer only what is handed in, and imports without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cluster.common.model.operators import define, nothing

Run = Callable[..., Tensor]


class Planned:
    """A wrapper's `run`, which flashinfer's kernels answer on a GPU; keep it as long as it runs."""

    def __init__(self, run: Run) -> None:
        """run: as the wrapper's: `run(q, (k, v), ...)`."""
        self.run = run
        self.number = next(_numbers)
        _planned[self.number] = self


_numbers: Iterator[int] = count()
_planned: WeakValueDictionary[int, Planned] = WeakValueDictionary()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    workspace: Tensor,
    planned: int,
) -> Tensor:
    return _planned[planned].run(q, (k, v))


def _attend_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    workspace: Tensor,
    out: Tensor,
    planned: int,
) -> None:
    _planned[planned].run(q, (k, v), out=out)


def _append(
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    indices: Tensor,
    indptr: Tensor,
    last_page_len: Tensor,
) -> None:
    from flashinfer.page import append_paged_kv_cache

    pages = (k_pages, v_pages)
    append_paged_kv_cache(k, v, entries, positions, pages, indices, indptr, last_page_len)


def _like_queries(q: Tensor, *others: object) -> Tensor:
    return torch.empty_like(q)


# q [n, head, head_dim]; k, v [n_pages, page size, head, head_dim], a layer's strided views; the
# table int32, on the device, as `PagedKV` has it. On a CPU flashinfer has no kernels: there `run`
# and `append_paged_kv_cache` are the tests' own.

attend_pages = define(
    "attend_pages",
    writes=("workspace",),
    cuda=_attend,
    cpu=_attend,
    shapes=_like_queries,
)

attend_pages_into = define(
    "attend_pages_into",
    writes=("workspace", "out"),
    cuda=_attend_into,
    cpu=_attend_into,
    shapes=nothing,
)

append_to_pages = define(
    "append_to_pages",
    writes=("k_pages", "v_pages"),
    cuda=_append,
    cpu=_append,
    shapes=nothing,
)
