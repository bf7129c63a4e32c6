"""An hour of load and random faults; goes on where an interrupted run of it stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.faults import random_fault
from tests.chaos.soak import MAX_GROWTH, Soak, soak

SOAK_S = float(os.environ.get("CHAOS_SOAK_S", "3600"))
STATE = Path(os.environ.get("CHAOS_SOAK_STATE", ".soak-state.json"))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
def test_an_hour_of_faults_loses_nothing_and_leaves_memory_flat() -> None:
    run = soak(SOAK_S, STATE, seed=1, rate=1.0)
    assert run.bad == [], run.line()
    growth = run.growth()
    assert growth is None or growth < MAX_GROWTH, run.line()
    STATE.unlink(missing_ok=True)


def test_growth_is_that_of_the_hour_whatever_the_levels() -> None:
    run = Soak(1, 2.0, n_starts=2)
    assert run.growth() is None
    for start, level in ((1, 100.0), (2, 150.0)):
        for minute in range(20):
            memory = {"all": level * (1 + 0.3 * minute / 60)}
            sample = {"start": start, "at_s": 60.0 * minute, "memory": memory, "files": {"all": 10}}
            run.samples.append(sample)
    assert run.growth() == pytest.approx(0.3, rel=0.15)
    assert run.growth("files") == pytest.approx(0.0, abs=1e-9)


def test_an_interrupted_soak_goes_on_and_another_does_not(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    run = Soak(7, 2.0, seconds=60.0, n_faults=3, n_starts=1)
    run.save(state)
    assert Soak.resumed(state, 7, 2.0) == run
    assert Soak.resumed(state, 8, 2.0) == Soak(8, 2.0)
    assert random_fault(7, 3).name == random_fault(7, 3).name
