"""Triton kernels where there is no GPU: interpreted, and compiled for one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch

ARCHITECTURES = (80, 89, 90)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def load_kernel(monkeypatch: pytest.MonkeyPatch, name: str, *, interpreted: bool) -> ModuleType:
    """A kernel's module in a copy of its own, for one test.

    Functions are interpreted or not as they are made, also Triton's own, so there are two Tritons,
    one of which at a time is `triton`.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    for found in [one for one in sys.modules if _is_triton(one)]:
        monkeypatch.delitem(sys.modules, found)
    for found, module in _tritons(interpreted).items():
        monkeypatch.setitem(sys.modules, found, module)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _tritons(interpreted: bool) -> dict[str, ModuleType]:
    importlib.import_module("triton.language")
    importlib.import_module("triton.compiler")
    importlib.import_module("triton.backends.compiler")
    importlib.import_module("triton.runtime.interpreter")
    return {name: module for name, module in sys.modules.items() if _is_triton(name)}


def _is_triton(name: str) -> bool:
    """Whether a module is one of Triton's that there are two of: what is in C there is once."""
    return name.partition(".")[0] == "triton" and not name.startswith("triton._C")


class _Recorded:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Self:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


def compiled(launch: Any, kernel: str, architecture: int, *given: Any) -> dict[str, Any]:
    """A kernel as a launcher would run it: "ptx", its text, and "shared", bytes of shared memory.

    launch: of a module from `load_kernel`, not interpreted. given: its arguments, meta tensors.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    recorded = _Recorded(launch.__globals__[kernel])
    with patch.dict(launch.__globals__, {kernel: recorded}):
        launch(*given)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    divisible: dict[tuple[int, ...], Any] = {}
    for place, (parameter, value) in enumerate(
        zip(recorded.function.params, recorded.args, strict=True)
    ):
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            divisible[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    source = ASTSource(recorded.function, signature, constexprs=constants, attrs=divisible)
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=target, options=recorded.options)
    _assert_launchable(recorded.function)
    return {"ptx": built.asm["ptx"], "shared": built.metadata.shared}


def _assert_launchable(function: Any) -> None:
    """Compare the module's constants as Triton does before each launch: a NaN never passes."""
    assert function.cache_key  # finds them
    for (name, _), (value, names) in function.used_global_vals.items():
        assert names[name] == value, f"no launch of a kernel with {name} = {value}"
