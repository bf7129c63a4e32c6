"""A recorder that remembers what it was told, by metric and tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from cluster.common.metrics import MetricSpec, Recorder


class Counted:
    def __init__(self, specs: tuple[MetricSpec, ...]) -> None:
        self._told: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = defaultdict(list)
        self.recorder = Recorder(specs, lambda spec: _Metric(spec.name, self._told))

    def of(self, name: str, **tags: str) -> list[float]:
        return self._told[name, frozenset(tags.items())]


class _Metric:
    def __init__(self, name: str, told: Any) -> None:
        self._name, self._told = name, told

    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._told[self._name, frozenset((tags or {}).items())].append(value)

    set = observe = inc
