"""The few calls of flashinfer that the backend makes, on the CPU, with the contract of its source.

What a plan fixes here (page counts, batch size, dtypes, the buffers' identity) a run checks; what a
run reads from the device there (indices, lengths of last pages) it reads from the buffers here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

BACKEND = "decoder_worker.attention.flashinfer_backend"
OURS = (BACKEND, "decoder_worker.attention.flashinfer_tables")


class Event:
    def __init__(self, blocking: bool) -> None: ...

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


class _Wrapper:
    made: ClassVar[list[_Wrapper]]

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        backend: str,
        **buffers: Tensor,
    ) -> None:
        """buffers: of the page table, in the order of `plan`, where a graph holds them."""
        assert (layout, backend, bool(buffers)) == ("NHD", "fa2", use_cuda_graph)
        self.buffers = list(buffers.values())
        self._pin_memory_int_workspace_buffer = torch.zeros(1)
        self.n_plans = 0
        self.made.append(self)

    def _note(self, sizes: tuple[int, ...], indptr: Tensor, dtypes: dict[str, Any]) -> None:
        assert indptr.dtype == torch.int32
        self.n_plans += 1
        self._sizes = sizes
        self._dtypes = dtypes
        self.counts = indptr.diff().tolist()

    def _attend(
        self, q: Tensor, kv: tuple[Tensor, Tensor], rows: list[int], causal: bool
    ) -> Tensor:
        n_head, n_kv_head, head_dim, page_size = self._sizes
        k, v = kv
        assert q.shape[1:] == (n_head, head_dim)
        assert k.shape[1:] == v.shape[1:] == (page_size, n_kv_head, head_dim)
        assert k.stride() == v.stride()
        assert (q.dtype, k.dtype) == (self._dtypes["q_data_type"], self._dtypes["kv_data_type"])
        indptr, indices, last = self.indptr.tolist(), self.indices.tolist(), self.last.tolist()
        assert [b - a for a, b in pairwise(indptr)] == self.counts
        return attend_pages(q, kv, rows, indptr, indices, last, head_dim**-0.5, causal=causal)


def attend_pages(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    rows: list[int],
    indptr: list[int],
    indices: list[int],
    last: list[int],
    scale: float,
    *,
    causal: bool,
) -> Tensor:
    """What the kernels compute: q [n, head, head_dim]; K and V [page, place, head, head_dim].

    rows: where each entry's queries begin, and the end. The others: flashinfer's page table.
    """
    out = torch.full_like(q, torch.nan)
    for i, (begin, end) in enumerate(pairwise(rows)):
        pages = indices[indptr[i] : indptr[i + 1]]
        length = (len(pages) - 1) * kv[0].shape[1] + last[i]
        k, v = (x[pages].flatten(0, 1)[:length].float() for x in kv)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        if causal:
            seen = torch.ones(end - begin, length).tril(length - (end - begin)).bool()
            scores = scores.masked_fill(~seen, -torch.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    made: ClassVar[list[_Wrapper]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.indptr, self.indices, self.last = self.buffers
        assert len(self.indptr) == len(self.last) + 1

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **dtypes: Any
    ) -> None:
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last.copy_(last_page_len)
        self._note(sizes, indptr, dtypes)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert len(q) == len(self.last)
        return out.copy_(self._attend(q, paged_kv_cache, list(range(len(q) + 1)), causal=False))


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *sizes: int,
    global_override_indptr_cpu: Tensor,
    **dtypes: Any,
) -> None:
    """Copies nothing: the caller has written the wrapper's own buffers."""
    assert wrapper.n_plans, "the kernels are not loaded"
    assert indptr is wrapper.indptr
    assert last_page_len is wrapper.last
    assert indices.data_ptr() == wrapper.indices.data_ptr()
    assert torch.equal(indptr, global_override_indptr_cpu)
    assert len(indices) == indptr[-1]
    wrapper._note(sizes, global_override_indptr_cpu, dtypes)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    made: ClassVar[list[_Wrapper]] = []

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *sizes: int,
        causal: bool = False,
        uniform_q_len: int = 0,
        **dtypes: Any,
    ) -> None:
        if self.buffers:
            assert set(qo_indptr.diff().tolist()) == {uniform_q_len}
        table = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        if self.buffers:
            assert len(qo_indptr) == len(self.buffers[0])
            for buffer, tensor in zip(self.buffers, table, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            assert not self.n_plans or qo_indptr[-1] <= self._rows[-1]
            table = self.buffers
        else:
            table = [tensor.clone() for tensor in table]
        _, self.indptr, self.indices, self.last = table
        self._rows = qo_indptr.tolist()
        self._causal = causal
        self._note(sizes, paged_kv_indptr, dtypes)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert len(q) == self._rows[-1]
        return out.copy_(self._attend(q, paged_kv_cache, self._rows, self._causal))


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    assert batch_indices.dtype == positions.dtype == torch.int32
    assert len(kv_last_page_len) == len(kv_indptr) - 1
    page_size = paged_kv_cache[0].shape[1]
    flat = kv_indptr[batch_indices.long()] * page_size + positions
    pages = kv_indices[(flat // page_size).long()].long()
    for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
        cache[pages, (flat % page_size).long()] = new


@contextmanager
def installed(flashinfer: ModuleType) -> Iterator[None]:
    """While open, the product finds this module installed, and imports its backend anew."""
    BatchDecodeWithPagedKVCacheWrapper.made = []
    BatchPrefillWithPagedKVCacheWrapper.made = []
    parts = ("flashinfer", "flashinfer.decode", "flashinfer.page", "flashinfer.prefill")
    shadowed = {name: sys.modules.get(name) for name in (*parts, *OURS)}
    sys.modules |= dict.fromkeys(parts, flashinfer)
    for name in OURS:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        for name, module in shadowed.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def fake_flashinfer() -> Iterator[ModuleType]:
    """The backend's module, on the fakes; and what of CUDA it needs, which does nothing."""
    with (
        installed(sys.modules[__name__]),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()),
    ):
        yield import_module(BACKEND)
