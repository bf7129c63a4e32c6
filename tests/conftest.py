"""For the whole suite: what each test process needs, wherever it is started from.

OpenMP threads that wait must sleep, or tests on a busy machine crawl. Ctrl-C must work in the
processes that tests start: a shell makes its background jobs ignore it, and their children inherit
that. Tests marked `gpu` are skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch sees none"))
