"""flashinfer's compiled modules on the CPU, as its own Python calls them.

Their functions take what those of the compiled ones take (flashinfer 0.7.2.post1), and compute in
torch what the kernels compute. Used by `tests.support.gpu.flashinfer_on_cpu`.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CAUSAL = 1  # flashinfer's MaskMode
NHD = 0  # flashinfer's TensorLayout


def module_on_cpu(name: str) -> Any:
    """What stands in for the compiled module of that name."""
    if name == "page":
        return SimpleNamespace(append_paged_kv_cache=_append)
    if name.startswith("batch_decode_"):
        return _Attention(with_tensor_cores=False)
    assert name.startswith("batch_prefill_"), f"nobody has written {name} for a CPU"
    return _Attention(with_tensor_cores=True)


class _Attention:
    """A compiled module of attention over pages, of decode steps or of prompts.

    A plan there fixes counts of pages, sizes and dtypes; what a run reads from the device (indices,
    lengths of last pages) is read here from the same buffers.
    """

    def __init__(self, *, with_tensor_cores: bool) -> None:
        self._plans: list[tuple[list[int], list[int], tuple[int, ...]]] = []
        self.plan = self._plan_prefill if with_tensor_cores else self._plan_decode
        if with_tensor_cores:
            self.paged_run = self._run_prefill
            self.ragged_run = None  # asked for, and not used
        else:
            self.run = self._run_decode

    def _plan_decode(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        indptr: Tensor,
        batch_size: int,
        n_head: int,
        n_kv_head: int,
        page_size: int,
        use_cuda_graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim: int,
        head_dim_vo: int,
        of_q: Tensor,
        of_kv: Tensor,
    ) -> list[int]:
        assert len(indptr) == batch_size + 1
        rows = list(range(batch_size + 1))
        return self._planned(rows, indptr, (n_head, n_kv_head, head_dim, page_size))

    def _plan_prefill(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        indptr: Tensor,
        kv_lengths: Tensor,
        most_rows: int,
        batch_size: int,
        n_head: int,
        n_kv_head: int,
        page_size: int,
        use_cuda_graph: bool,
        head_dim: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int,
        uniform_q_len: int,
    ) -> list[int]:
        assert len(qo_indptr) == len(indptr) == batch_size + 1
        assert qo_indptr[-1] <= most_rows
        return self._planned(qo_indptr.tolist(), indptr, (n_head, n_kv_head, head_dim, page_size))

    def _planned(self, rows: list[int], indptr: Tensor, sizes: tuple[int, ...]) -> list[int]:
        assert indptr.dtype == torch.int32
        assert indptr.device.type == "cpu"
        self._plans.append((rows, indptr.tolist(), sizes))
        return [len(self._plans) - 1]

    def _run_decode(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        *rope: float,
    ) -> None:
        table = (indptr, indices, last_page_len)
        self._attend(plan, q, (k, v), table, out, (layout, sm_scale), causal=False)

    def _run_prefill(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        custom_mask: Tensor | None,
        mask_indptr: Tensor | None,
        alibi_slopes: Tensor | None,
        prefix_len: Tensor | None,
        token_pos: Tensor | None,
        max_item_len: Tensor | None,
        k_block_scales: Tensor | None,
        v_block_scales: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        *rope: float,
    ) -> None:
        assert qo_indptr.tolist() == self._plans[plan[0]][0]
        table = (indptr, indices, last_page_len)
        causal = mask_mode == CAUSAL
        self._attend(plan, q, (k, v), table, out, (layout, sm_scale), causal=causal)

    def _attend(
        self,
        plan: list[int],
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        table: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        how: tuple[int, float],
        *,
        causal: bool,
    ) -> None:
        rows, planned_indptr, (n_head, n_kv_head, head_dim, page_size) = self._plans[plan[0]]
        (indptr, indices, last_page_len), (layout, sm_scale) = table, how
        assert layout == NHD
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.tolist() == planned_indptr, "the pages are not those of the plan"
        assert q.shape == out.shape == (rows[-1], n_head, head_dim)
        assert kv[0].stride() == kv[1].stride(), "K and V need other kernels"
        assert all(one.shape[1:] == (page_size, n_kv_head, head_dim) for one in kv)
        for entry, (begin, end) in enumerate(pairwise(rows)):
            pages = indices[planned_indptr[entry] : planned_indptr[entry + 1]].long()
            n = (len(pages) - 1) * page_size + int(last_page_len[entry])
            k, v = (one[pages].flatten(0, 1)[:n].float() for one in kv)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * sm_scale
            if causal:
                seen = torch.ones(end - begin, n).tril(n - (end - begin)).bool()
                scores = scores.masked_fill(~seen, -torch.inf)
            out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


def _append(
    key: Tensor,
    value: Tensor,
    entries: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    indices: Tensor,
    indptr: Tensor,
    last_page_len: Tensor,
    layout: int,
) -> None:
    """Where a token goes follows from its position and the page table alone."""
    assert layout == NHD
    page_size = k_pages.shape[1]
    flat = indptr[entries.long()] * page_size + positions
    pages = indices[(flat // page_size).long()].long()
    for cache, new in ((k_pages, key), (v_pages, value)):
        cache[pages, (flat % page_size).long()] = new
