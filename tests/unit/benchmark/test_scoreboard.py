"""The scoreboard reads what the benchmarks print, and knows which rows are of older code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.scoreboard import __main__ as scoreboard

RESULTS = Path(__file__).parents[3] / "benchmark/results"


def test_ratios_are_those_of_the_medians_beside_them() -> None:
    figures = json.loads((RESULTS / "cpu-zen5-2-cores-base-2026-11-22.json").read_text())
    lines = list(scoreboard.of_engines(figures))
    assert [line["what"] for line in lines if "8 in flight" in line["what"]]
    for line in lines:
        ours = float(line["splitscribe"].split()[0])
        *rivals, ceiling = line["beside it"].split("; ")
        assert ceiling == "ceiling 7.98 by products in bfloat16"
        assert len(rivals) == len(scoreboard.LIBRARIES)
        for beside in rivals:
            rate, ratio = float(beside.split()[0]), float(beside.rpartition("x ")[2].rstrip(")"))
            assert ratio == pytest.approx(ours / rate, abs=0.006)


def test_a_row_is_stale_once_its_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = scoreboard.PARTS["transfer"]
    assert scoreboard.is_stale(part, "0123456789")
    monkeypatch.setattr(scoreboard, "PARTS", {"transfer": part})
    row = {"shape": "large-v3", "mb": 245.8, "median_ms": {"ours": 18.1, "memcpy": 16.7}}
    entry = {"commit": "0123456789", "date": "2026-11-26", "cpu": "2 cores of one"}
    (shown,) = scoreboard.rows_of({"transfer": {**entry, "figures": {"rows": [row]}}})
    assert shown["splitscribe"] == "18.1 ms"
    assert "stale" in shown["run"]
