"""An hour of load and random faults."""

from __future__ import annotations

import os

import pytest

from tests.chaos.soak import MAX_GROWTH, MIN_SAMPLES, growth_per_hour, soak

SOAK_S = float(os.environ.get("CHAOS_SOAK_S", "3600"))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
def test_an_hour_of_faults_loses_nothing_and_leaves_memory_flat() -> None:
    run = soak(SOAK_S, seed=1, rate=1.0)
    assert run.bad == [], run.line()
    growth = run.growth()
    assert growth is None or growth < MAX_GROWTH, run.line()


def test_growth_is_that_of_an_hour() -> None:
    samples = [
        {"at_s": 60.0 * n, "memory": {"a": 100.0, "b": 0.5 * n}, "files": {"a": 10}}
        for n in range(20)
    ]
    assert growth_per_hour(samples[: MIN_SAMPLES - 1], "memory") is None
    assert growth_per_hour(samples, "memory") == pytest.approx(0.3, rel=0.15)
    assert growth_per_hour(samples, "files") == pytest.approx(0.0, abs=1e-9)
