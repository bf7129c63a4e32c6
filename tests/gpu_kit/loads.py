"""In a process that sees the kit and a bare machine: import all of it, and load every kernel.

    python -m tests.gpu_kit.loads SITE TOOLKIT    # where the kit is, and CUDA's runtime

Every kernel that the backend asks for must be there compiled, must load without a driver, and must
have the functions that flashinfer calls. What it calls itself is looked up at the first call: for
tiles that it never chooses flashinfer declares kernels and compiles none.
"""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FUNCTIONS = {  # by how a kernel's name begins
    "page": ("append_paged_kv_cache",),
    "batch_decode": ("plan", "run"),
    "batch_prefill": ("plan", "paged_run"),
}


def import_all(site: Path) -> list[str]:
    """Every top-level module of every distribution in `site`, from there."""
    names = set()
    for found in distributions(path=[str(site)]):
        for file in found.files or ():
            top = file.parts[0]
            if len(file.parts) == 1 and top.endswith(".py"):
                names.add(top.removesuffix(".py"))
            elif len(file.parts) == 2 and file.name == "__init__.py":
                names.add(top)
    for name in sorted(names):
        module = import_module(name)
        assert str(module.__file__).startswith(str(site)), f"{name} is {module.__file__}"
    return sorted(names)


def load_kernels(site: Path, toolkit: Path) -> list[str]:
    """All that our backend asks of the kit's flashinfer, by name."""
    import tvm_ffi

    from tests.gpu_kit.kernels import ask_for_kernels
    from tests.support.gpu.flashinfer_on_cpu import flashinfer_on_cpu

    ctypes.CDLL(str(toolkit / "nvidia" / "cu13" / "lib" / "libcudart.so.13"), ctypes.RTLD_GLOBAL)
    with flashinfer_on_cpu(site) as asked:
        ask_for_kernels(asked)
        for name, spec in asked.specs.items():
            assert spec.is_aot, f"the kit has not {name}"
            module: Any = tvm_ffi.load_module(str(spec.aot_path))
            (functions,) = (FUNCTIONS[kind] for kind in FUNCTIONS if name.startswith(kind))
            for function in functions:
                assert module.implements_function(function), f"{name} has no {function}"
    return sorted(asked.specs)


def main() -> int:
    site, toolkit = map(Path, sys.argv[1:])
    print(f"imported: {', '.join(import_all(site))}")
    print(f"loaded {len(load_kernels(site, toolkit))} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
