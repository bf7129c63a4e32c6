"""flashinfer's compiled modules on the CPU, as its own Python calls them.

Their functions take what those of the compiled ones take (flashinfer 0.7.2.post1), and compute in
torch what the kernels compute. Used by `tests.support.gpu.flashinfer_on_cpu`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.gpu.fake_flashinfer import append_paged_kv_cache, attend_pages

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

    def _plan_decode(self, *given: Any) -> list[int]:
        """Two workspaces, a pinned one, the page counts and sizes."""
        _, _, _, indptr, batch_size, n_head, n_kv_head, page_size = given[:8]
        assert len(given) == 15
        assert len(indptr) == batch_size + 1
        rows = list(range(batch_size + 1))
        return self._planned(rows, indptr, (n_head, n_kv_head, given[11], page_size))

    def _plan_prefill(self, *given: Any) -> list[int]:
        """The same, with the queries' rows, lengths and the most rows."""
        qo_indptr, indptr, _, most_rows, batch_size, n_head, n_kv_head, page_size = given[3:11]
        assert len(given) == 20
        assert len(qo_indptr) == len(indptr) == batch_size + 1
        assert qo_indptr[-1] <= most_rows
        return self._planned(qo_indptr.tolist(), indptr, (n_head, n_kv_head, given[12], page_size))

    def _planned(self, rows: list[int], indptr: Tensor, sizes: tuple[int, ...]) -> list[int]:
        assert indptr.dtype == torch.int32
        assert indptr.device.type == "cpu"
        self._plans.append((rows, indptr.tolist(), sizes))
        return [len(self._plans) - 1]

    def _run_decode(self, *given: Any) -> None:
        """Two workspaces, the plan, q, k, v, the page table, out, lse, layout and how to mix."""
        _, _, plan, q, k, v, *table, out, _, layout = given[:12]
        self._attend(plan, q, (k, v), table, out, (layout, given[16]), causal=False)

    def _run_prefill(self, *given: Any) -> None:
        """The same, with the queries' rows, a mask's mode and what else a mask may need."""
        _, _, plan, q, k, v, qo_indptr, *table, out, _, mask_mode, layout = given[:14]
        assert qo_indptr.tolist() == self._plans[plan[0]][0]
        how = (layout, given[25])
        self._attend(plan, q, (k, v), table, out, how, causal=mask_mode == CAUSAL)

    def _attend(
        self,
        plan: list[int],
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        table: list[Tensor],
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
        seen = (indptr.tolist(), indices.tolist(), last_page_len.tolist())
        out.copy_(attend_pages(q, kv, rows, *seen, sm_scale, causal=causal))


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
    assert layout == NHD
    append_paged_kv_cache(
        key, value, entries, positions, (k_pages, v_pages), indices, indptr, last_page_len
    )
