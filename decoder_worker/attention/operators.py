"""The operators of attention on a GPU: the append of a projection, and flashinfer's calls.

The append reads a self-attention's fused product once. Imports without flashinfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import define, launcher


def _plain_append(
    qkv: Tensor,
    bias: Tensor | None,
    entries: Tensor,
    positions: Tensor,
    indptr: Tensor,
    indices: Tensor,
    pool: Tensor,
    layer: int,
    q: Tensor,
) -> None:
    """Add the bias, write keys and values into their pages, and the queries to `q`.

    qkv: [n_tokens, 3 * d], order q, k, v. bias: [3 * d] or None. entries, positions: int32
    [n_tokens], of each token, counted from 0. indptr, indices: int32, the pages of an entry, as in
    `PagedKV`. pool: [page, layer, 2, page size, head, head_dim], of any float dtype. q: [n_tokens,
    head, head_dim]. All on one device, and contiguous.

    Example: position 70 of an entry whose pages of 64 are [9, 4] is position 6 of page 4.
    """
    summed = qkv.float() if bias is None else qkv.float() + bias.float()
    own_q, k, v = summed.view(len(qkv), 3, *q.shape[1:]).unbind(1)
    page_size = pool.shape[3]
    pages = indices[(indptr[entries.long()] + positions // page_size).long()].long()
    where = (pages, (positions % page_size).long())
    q.copy_(own_q)
    pool[:, layer, 0].index_put_(where, k.to(pool.dtype))
    pool[:, layer, 1].index_put_(where, v.to(pool.dtype))


def empty_queries(qkv: Tensor, pool: Tensor) -> Tensor:
    return torch.empty((len(qkv), *pool.shape[4:]), dtype=qkv.dtype, device=qkv.device)


append_qkv = define(
    "append_qkv",
    writes=("pool", "q"),
    cuda=launcher("decoder_worker.gpu.kernels", "launch_append"),
    cpu=_plain_append,
)


Run = Callable[..., Tensor]


class Planned:
    """Registers a wrapper's `run` by a number; keep it alive while the number is in use.

    Operators take only tensors and numbers, so a number names the wrapper, which holds a plan. What
    a kernel accesses of the wrapper is passed as an argument besides.
    """

    def __init__(self, run: Run) -> None:
        """run: called as `run(q, (k, v), out=...)`."""
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


# q [n, head, head_dim]; k, v [n_pages, page size, head, head_dim], a layer's strided views; the
# table int32, on the device, as in `PagedKV`. On a CPU, where flashinfer has no kernels, tests
# provide `run` and `append_paged_kv_cache`.

attend_pages = define(
    "attend_pages",
    writes=("workspace", "out"),
    cuda=_attend,
    cpu=_attend,
)

append_to_pages = define(
    "append_to_pages",
    writes=("k_pages", "v_pages"),
    cuda=_append,
    cpu=_append,
)
