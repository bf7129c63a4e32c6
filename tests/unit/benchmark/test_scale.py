"""The parts of the benchmark of growth run, and a growth is what its figures say."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from rich.console import Console

from benchmark.serving.scale.figures import Figure, cpu_us, exponent, show


def figures(what: str, *costs: float) -> list[Figure]:
    return [Figure(what, 10**size, "us", None, cost) for size, cost in enumerate(costs, start=1)]


def test_a_growth_is_the_exponent_of_the_two_largest_sizes() -> None:
    assert exponent(figures("flat", 5.0, 5.0, 5.0)) == pytest.approx(0.0)
    assert exponent(figures("linear", 90.0, 10.0, 100.0)) == pytest.approx(1.0)
    assert exponent(figures("square", 1.0, 2.0, 200.0)) == pytest.approx(2.0)
    shown = show(Console(quiet=True), [*figures("a", 1.0, 10.0), *figures("b", 3.0)])
    assert shown == {"a": 1.0}


def test_a_ratio_is_ours_over_the_ceiling() -> None:
    assert Figure("a", 1, "us", 2.0, 5.0).as_json()["ratio"] == 2.5
    assert Figure("a", 1, "us", None, 5.0).as_json()["ratio"] is None


def test_processor_time_is_that_of_one_call() -> None:
    calls = []
    each_us = cpu_us(lambda: calls.append(sum(range(1000))), 0.002)
    assert len(calls) > 20
    assert 0.0 < each_us < 1e6


@pytest.mark.parametrize("part", ["choice", "control", "fan_out"])
def test_a_part_measures_every_size(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is run once, for real; its time is not looked at."""
    module = importlib.import_module(f"benchmark.serving.scale.{part}")

    def once(operation: Callable[[], object], least_s: float = 0.0) -> float:
        operation()
        return 1.0

    monkeypatch.setattr(module, "SIZES", (10, 40))
    monkeypatch.setattr(module, "cpu_us", once)
    found = module.measure()
    assert {figure.size for figure in found} >= {10, 40}
    assert all(figure.ours > 0 for figure in found)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["requests", "peers", "questions"])
def test_a_part_that_takes_seconds_measures(part: str) -> None:
    """With real NIXL agents and a real Ray."""
    found = importlib.import_module(f"benchmark.serving.scale.{part}").measure()
    assert len(found) >= 3
    assert all(figure.ours > 0 for figure in found)
