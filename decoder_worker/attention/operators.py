"""The operators of attention on a GPU: the append of a projection, and flashinfer's calls.

One kernel reads the fused product of a self-attention once, adds its bias, and writes the queries
side by side, and keys and values where the page table says. Knows of flashinfer only what is handed
in, and imports without it.
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
    [n_tokens], of each token, counted from 0; indptr, indices: int32, the pages of an entry, as in
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
    """[n_tokens, head, head_dim] for the queries of `qkv`."""
    return torch.empty((len(qkv), *pool.shape[4:]), dtype=qkv.dtype, device=qkv.device)


append_qkv = define(
    "append_qkv",
    writes=("pool", "q"),
    cuda=launcher("decoder_worker.gpu.kernels", "launch_append"),
    cpu=_plain_append,
)


Run = Callable[..., Tensor]


class Planned:
    """A wrapper's `run`, which flashinfer's kernels answer on a GPU; keep it as long as it runs.

    An operator takes tensors and numbers only, so a wrapper, which holds a plan, is registered here
    and named by a number. Whatever of the wrapper's a kernel reads or writes is an argument beside.
    """

    def __init__(self, run: Run) -> None:
        """run: as the wrapper's: `run(q, (k, v), out=...)`."""
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
# table int32, on the device, as `PagedKV` has it. On a CPU flashinfer has no kernels: there `run`
# and `append_paged_kv_cache` are the tests' own.

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
