"""Our calls of flashinfer against the installed package: its own Python, on the CPU.

Its compiled modules stand in (`tests.support.gpu.flashinfer_on_cpu`); signatures, checks and plans
are the real ones, so that a release that changes one of them fails here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_kit.kernels import ask_for_kernels
from tests.gpu_kit.packages import installed
from tests.support.gpu.flashinfer_on_cpu import flashinfer_on_cpu, our_imports

pytestmark = [  # slow: flashinfer is pinned, and only another version changes the result
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("gpu-check"),
        reason="needs flashinfer's own Python (`make gpu-check-install` fetches it)",
    ),
]


def test_what_we_import_is_there_and_called(tmp_path: Path) -> None:
    """Every name that our code takes from flashinfer is there, and meets its signature here."""
    with flashinfer_on_cpu(cache=tmp_path) as asked:
        ask_for_kernels(asked)
    imported = {name for names in our_imports().values() for name in names}
    assert imported <= {name.partition(".")[0] for name in asked.called}
    assert {"BatchDecodeWithPagedKVCacheWrapper.plan", "fast_decode_plan"} <= asked.called
