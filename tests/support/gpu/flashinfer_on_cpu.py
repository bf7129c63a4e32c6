"""The installed flashinfer on a CPU: its own Python runs, over stand-ins for its compiled modules.

So calls meet the package's real signatures, checks and plans, and the modules that a GPU machine
needs are noted. The package lies in a folder of its own (`make gpu-check-install`).
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
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.gpu_kit.packages import FOLDER
from tests.support.gpu.fake_flashinfer import OURS, Event

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("cluster", "decoder_worker", "encoder_worker", "router")


class OnCpu:
    """specs: the modules that were asked for, by name (`JitSpec`).

    called: `function` or `Class.method` of all that our code imports and has called.
    """

    def __init__(self) -> None:
        self.specs: dict[str, Any] = {}
        self.called: set[str] = set()

    def module(self, spec: Any) -> Any:
        """In place of the compiled module of `spec`: computes nothing."""
        self.specs[spec.name] = spec
        plan = lambda *given: [0]  # noqa: E731
        nothing = lambda *given: None  # noqa: E731
        names = ("append_paged_kv_cache", "run", "paged_run", "ragged_run")
        return SimpleNamespace(plan=plan, **dict.fromkeys(names, nothing))

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
    """Import flashinfer from `folder` meanwhile.

    cache: for the sources of what it would compile [beside the package]. arch: of the target.
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
        core = import_module("flashinfer.jit.core")
        build = patch.object(core.JitSpec, "build_and_load", lambda spec: asked.module(spec))
        stack.enter_context(build)
        for patched in _without_cuda():
            stack.enter_context(patched)
        for module, imported in our_imports().items():
            for name in imported:
                asked.watch(import_module(module), name)
        yield asked


def _ours_and_theirs() -> list[str]:
    return [name for name in sys.modules if name in OURS or _is_theirs(name)]


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] == "flashinfer"


def _restore(before: dict[str, ModuleType]) -> None:
    for name in _ours_and_theirs():
        del sys.modules[name]
    sys.modules.update(before)


def _without_cuda() -> list[Any]:
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
