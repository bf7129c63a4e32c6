"""`splitscribe profile` measures this machine, and what it writes can be simulated."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import SPLITSCRIBE

MEASURE_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_measured_profile_can_be_simulated(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    command = [SPLITSCRIBE, "profile", "--rounds", "3", "-o", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_S, check=False)
    assert run.returncode == 0, run.stderr
    simulate = [SPLITSCRIBE, "simulate", "--profile", str(file), "--rate", "1", "--seconds", "10"]
    told = subprocess.run(simulate, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert "profile mine (measured)" in told.stdout
