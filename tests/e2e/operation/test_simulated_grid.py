"""Simulations beside real servers whose devices wait: the whole grid, by number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SECONDS = os.environ.get("GRID_SECONDS", "45")  # of each run, in real time
LIMIT_S = 1200
BUSY = 0.5  # of the cores: from there on a real step begins late, and nothing can be compared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_simulations_agree_with_real_servers(workers: int) -> None:
    program = ("-m", "benchmark.planning.simulation", "--workers", str(workers))
    out = subprocess.check_output(
        [sys.executable, *program, "--seconds", SECONDS], text=True, timeout=LIMIT_S
    )
    told = next(line for line in out.splitlines() if line.startswith('{"benchmark"'))
    rows = json.loads(told)["rows"]
    assert {row["kind"] for row in rows} >= {"clips", "lengths"}
    assert all(row["failed"] == [0, 0] for row in rows), "no request is lost, by none of the two"
    quiet = [row for row in rows if row["machine_busy"] < BUSY and row["load"] < 1]
    for row in quiet:
        assert row["goodput_ratio"] == pytest.approx(1, abs=0.1), row
        assert row["p50_ratio"] == pytest.approx(1, abs=0.15), row
        assert row["p95_ratio"] == pytest.approx(1, abs=0.3), row
