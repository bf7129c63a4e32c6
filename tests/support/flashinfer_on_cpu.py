"""The installed flashinfer on a CPU: its own Python runs, and its compiled modules stand in here.

So every call of ours meets the package's real signatures, checks and plans, and what comes out can
be compared with torch's. The place where flashinfer would compile or load a module gives one of
these instead, which computes in torch what the kernels compute, and notes which module it was: the
modules that a GPU machine needs are those that our backend asked for.

The package lies in a folder of its own (`make gpu-check-install`); it does not stay imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.gpu_kit.packages import FOLDER
from tests.support.fake_flashinfer import Event

BACKEND = "decoder_worker.attention.flashinfer_backend"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "decoder_worker", "encoder_worker", "router")
CAUSAL = 1  # flashinfer's MaskMode
NHD = 0  # flashinfer's TensorLayout


class OnCpu:
    """What was asked of flashinfer while it ran here.

    specs: the modules, by name, as flashinfer describes them to its compiler (`JitSpec`).
    called: what our code imports and has called by now, `function` or `Class.method`; every such
        call was bound to its signature first.
    """

    def __init__(self) -> None:
        self.specs: dict[str, Any] = {}
        self.called: set[str] = set()

    def module(self, spec: Any) -> Any:
        """In place of the compiled module of `spec`."""
        self.specs[spec.name] = spec
        if spec.name == "page":
            return SimpleNamespace(append_paged_kv_cache=_append)
        if spec.name.startswith("batch_decode_"):
            return _Attention(with_tensor_cores=False)
        assert spec.name.startswith("batch_prefill_"), f"nobody has written {spec.name} for a CPU"
        return _Attention(with_tensor_cores=True)

    def watch(self, module: ModuleType, name: str) -> None:
        """Bind and note the calls of a function, or of a class's methods, from now on."""
        found = getattr(module, name)
        if not inspect.isclass(found):
            setattr(module, name, self._bound(name, found))
            return
        for method, function in list(vars(found).items()):
            if inspect.isfunction(function) and (method == "__init__" or method[0] != "_"):
                setattr(found, method, self._bound(f"{name}.{method}", function))

    def _bound(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            signature.bind(*args, **options)
            self.called.add(name)
            return function(*args, **options)

        return call


def our_imports() -> dict[str, set[str]]:
    """What our packages import from flashinfer: names by module."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and _is_theirs(str(node.module)):
                    found.setdefault(str(node.module), set()).update(a.name for a in node.names)
                elif isinstance(node, ast.Import):
                    whole = any(_is_theirs(alias.name) for alias in node.names)
                    assert not whole, f"{file} imports all of flashinfer: import its names"
    return found


@contextmanager
def flashinfer_on_cpu(
    folder: Path = FOLDER, cache: Path | None = None, arch: str = "9.0a"
) -> Iterator[OnCpu]:
    """Import flashinfer from `folder` and let it run here; afterwards it is gone again.

    cache: where it writes the sources of what it would compile [beside the package]. arch: what
    it would compile them for.
    """
    asked = OnCpu()
    environment = {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_LOGGING_LEVEL": "warning",
        "FLASHINFER_WORKSPACE_BASE": str(cache or folder / "cache"),
    }
    before = {name: sys.modules.pop(name) for name in _ours_and_theirs()}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch.object(sys, "path", [*sys.path, str(folder)]))
        stack.callback(_restore, before)
        core, names = import_module("flashinfer.jit.core"), import_module("flashinfer.jit.utils")
        build = patch.object(core.JitSpec, "build_and_load", lambda spec: asked.module(spec))
        stack.enter_context(build)
        tables = (names.dtype_map, names.dtype_map_kv, names.filename_safe_dtype_map)
        for table in tables:  # flashinfer has no float32, which gives equal texts
            stack.enter_context(patch.dict(table, {torch.float32: "float"}))
        for patched in _without_cuda():
            stack.enter_context(patched)
        for module, imported in our_imports().items():
            for name in imported:
                asked.watch(import_module(module), name)
        yield asked


def _ours_and_theirs() -> list[str]:
    return [name for name in sys.modules if name == BACKEND or _is_theirs(name)]


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] == "flashinfer"


def _restore(before: dict[str, ModuleType]) -> None:
    for name in _ours_and_theirs():
        del sys.modules[name]
    sys.modules.update(before)


def _without_cuda() -> list[Any]:
    """What of CUDA flashinfer's Python and the backend use, which does nothing here."""
    empty = torch.empty

    @functools.wraps(empty)
    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*args, **options)

    return [
        patch.object(torch, "empty", unpinned),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()),
    ]


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
