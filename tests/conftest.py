"""For the whole suite: what each test process needs, wherever it is started from.

OpenMP threads that wait must sleep, and a worker of pytest-xdist has one of them, or tests on a
busy machine crawl. Ctrl-C must work in the
processes that tests start: a shell makes its background jobs ignore it, and their children inherit
that. Tests marked `gpu` are skipped where torch sees no CUDA device; `pytest -m gpu` imports their
files only, since a GPU machine may have nothing that the others need (`tests.gpu_kit.bare`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.common.kernels.cpu.cache import ensure_jit_cache

ensure_jit_cache()  # some tests import kernels themselves
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is a worker for every core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """What a property needs more of says so itself. No deadline: machines of tests are busy."""
    try:
        from hypothesis import HealthCheck, settings
    except ModuleNotFoundError:  # on a GPU machine
        return
    slow = [HealthCheck.too_slow]
    settings.register_profile("usual", max_examples=40, deadline=None, suppress_health_check=slow)
    settings.load_profile("usual")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != "gpu":
        return None
    whole = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return None if any(map(may_hold_gpu_tests, whole)) else True


def may_hold_gpu_tests(file: Path) -> bool:
    """Whether the file names the mark, or its room does so for its fixtures."""
    return any(
        place.exists() and "mark.gpu" in place.read_text()
        for place in (file, file.with_name("conftest.py"))
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many inputs were tried by tests that generate them; see `make fuzz`."""
    passed = terminalreporter.getreports("passed")
    tried = sum(dict(report.user_properties).get("inputs", 0) for report in passed)
    if tried and not terminalreporter.getreports("failed"):
        answered = f"{tried} inputs tried, {tried} typed answers, nothing left over"
        terminalreporter.write_line(answered, green=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch sees none"))
