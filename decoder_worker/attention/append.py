"""What stands between the projection of one self-attention and its kernel: bias, split, append.

One kernel reads the fused product once and writes the queries side by side, and keys and values
where the page table says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import launcher
from cluster.common.model.operators import define, nothing


@dataclass(frozen=True, slots=True)
class Places:
    """Where new tokens stand in a page table; all int32, on the pool's device.

    entries, positions [n_tokens]: of each token, counted from 0. indptr [n_entries + 1], indices:
    the pages of an entry, as in `PagedKV`.

    Example: position 70 of an entry whose pages of 64 are [9, 4] is position 6 of page 4.
    """

    entries: Tensor
    positions: Tensor
    indptr: Tensor
    indices: Tensor


def append_qkv(
    qkv: Tensor, bias: Tensor | None, places: Places, pool: Tensor, layer: int, q: Tensor
) -> None:
    """Add the bias, write keys and values into their pages, and the queries to `q`.

    Mutates pool and q.

    Args:
        qkv: [n_tokens, 3 * d], contiguous, order q, k, v. bias: [3 * d] or None.
        pool: [page, layer, 2, page size, head, head_dim], contiguous, of any float dtype.
        q: [n_tokens, head, head_dim], contiguous.
    """
    table = (places.entries, places.positions, places.indptr, places.indices)
    _operator(qkv, bias, *table, pool, layer, q)


def _plain(
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


_operator = define(
    "append_qkv",
    writes=("pool", "q"),
    cuda=launcher("decoder_worker.attention.append_kernel"),
    cpu=_plain,
    shapes=nothing,
)
