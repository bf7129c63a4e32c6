"""Replicas without Serve, and Triton kernels without a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from cluster.common.kernels.gpu.operators import TRITON
from cluster.common.metrics import MetricSpec, Recorder
from tests.support.gpu.triton_kernels import load_kernel

Counted = dict[tuple[str, ...], float]  # by name and the values of its tags


@pytest.fixture
def as_replica(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What a replica asks of Serve is answered here; what its counters counted."""
    counted: Counted = defaultdict(float)

    class Metric:
        def __init__(self, spec: MetricSpec) -> None:
            self.spec = spec

        def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self.spec.tags)
            assert self.spec.kind == "counter"
            counted[self.spec.name, *(tags or {}).values()] += value

        def set(self, value: float, tags: object = None) -> None:
            """Not kept."""

        observe = set

    def start(role: str, settings: Any, build: str, specs: Any) -> Any:
        return f"{role}-1", Recorder(specs, Metric)

    monkeypatch.setattr("cluster.serve.replicas.pool_replicas.start_replica", start)
    workers = "cluster.serve.replicas.workers"
    monkeypatch.setattr(f"{workers}.start_replica", start)
    monkeypatch.setattr(f"{workers}.own_node", str)
    monkeypatch.setattr(f"{workers}.gpu_share", lambda: 1.0)
    return counted


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., None]]:
    """Gives a launcher of `kernels.gpu.triton_kernels`, by its name, in Triton's interpreter."""

    def load(name: str) -> Callable[..., None]:
        module = load_kernel(monkeypatch, TRITON, interpreted=True)
        launch: Callable[..., None] = getattr(module, name)
        return launch

    return load
