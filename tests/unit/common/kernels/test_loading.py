"""Cached kernels are loaded without numba's compiler, and run; what is not cached is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from cluster.common.kernels.cpu.cache import VARIABLE
from cluster.common.kernels.cpu.machine_code import TESTED
from cluster.serve.distribution import package_root

KERNEL = """
import json, sys
import numpy as np
from numba import njit

@njit(cache=True, nogil=True)
def norm(x, out):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    out[:] = x / np.sqrt(total)

if __name__ == "__main__":
    from cluster.common.kernels.cpu.machine_code import load_machine_code_alone
    load_machine_code_alone()
    load_machine_code_alone()
    out = np.zeros(2, np.float32)
    norm(np.array([3, 4], np.float32), out)
    print(json.dumps({
        "out": [round(float(x), 3) for x in out],
        "hits": sum(norm.stats.cache_hits.values()),
        "compiler": "numba.typed.dictimpl" in sys.modules,
        "scipy": "scipy.linalg" in sys.modules,
    }))
"""


@pytest.mark.slow  # a compiler in two processes
def test_a_cached_kernel_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    """In processes of their own: what numba has imported once it does not import again."""
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environment = os.environ | {VARIABLE: str(tmp_path), "PYTHONPATH": str(package_root())}

    def run() -> dict[str, object]:
        told = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, object] = json.loads(told.stdout)
        return answer

    first, second = run(), run()
    assert first == {"out": [0.6, 0.8], "hits": 0, "compiler": True, "scipy": False}
    assert second == {"out": [0.6, 0.8], "hits": 1, "compiler": False, "scipy": False}


def test_this_numba_is_one_that_was_tried() -> None:
    """With another one workers are as well, but heavier: try it, and add it."""
    assert numba.version_info.short in TESTED
