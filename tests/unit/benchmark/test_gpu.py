"""What can be said of the GPU's benchmark on a CPU: that all of it runs, and survives itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.gpu import __main__ as gpu
from benchmark.gpu.__main__ import file_of, keep
from benchmark.gpu.rig import Served
from benchmark.gpu.serving import closed_loop, latencies
from benchmark.shared.flops import H200, SHAPES
from cluster.common.messages import DecodeTimings

TIMINGS = DecodeTimings(0.0, 0.0, 0, "memory", 0.0, 0.0, 0)


async def one() -> Served:
    begun = time.perf_counter()
    await asyncio.sleep(0.01)
    return Served(begun, time.perf_counter(), 0.005, TIMINGS)


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    served, rate = await closed_loop(one, 4, 0.3)
    assert 0 < rate <= 4 / 0.01
    row = latencies(served)
    assert row["requests"] == len(served)
    assert 10 <= row["e2e_p50_ms"] <= row["e2e_p99_ms"]
    assert row["ttft_p50_ms"] == 5


async def test_a_loop_shorter_than_a_request_counts_the_one() -> None:
    alone, rate = await closed_loop(one, 1, 0.001)  # shorter than a request
    assert len(alone) == 1
    assert rate > 0


CHILD = """
import pathlib, sys, time
name, file = sys.argv[1:]
pathlib.Path(file).write_text('{"windows/s": 3.0}')
time.sleep(60 if name == "encoder" else 0)
sys.exit(6 if name == "decoder" else 0)
"""


class Scripted(gpu.Sections):
    def command(self, name: str, seconds: float) -> list[str]:
        assert seconds <= 60 * self._args.minutes
        return [sys.executable, "-c", CHILD, name, str(gpu.rows_file(self._work, name))]


def test_a_section_that_fails_or_hangs_costs_only_its_own_rows(tmp_path: Path) -> None:
    kept: list[str] = []
    args = gpu.parse(["--sections", "encoder,decoder,e2e", "--minutes", "0.05"])
    args.device = "cuda"
    sections = Scripted(args, tmp_path, lambda results: kept.append(json.dumps(results)))
    begun = time.monotonic()
    sections.run(["encoder", "decoder", "e2e"])
    assert time.monotonic() - begun < 50, "the section that hung was not ended"
    results = sections.results
    assert results["encoder"]["failed"] == "hung, and was ended"
    assert results["decoder"]["failed"] == "exit status 6"
    assert "failed" not in results["e2e"]
    assert all(rows["windows/s"] == 3.0 for rows in results.values())
    assert any(json.loads(one).get("encoder", {}) == {"windows/s": 3.0} for one in kept), (
        "the rows of a section that runs were not kept"
    )


def test_results_are_kept_by_device_date_and_commit(tmp_path: Path) -> None:
    summary = {"device": "NVIDIA H200", "date": "2026-01-31", "commit": "abc1234"}
    whole = file_of(summary, [], tmp_path / "new")
    assert whole.name == "nvidia-h200-2026-01-31-abc1234.json"
    part = file_of(summary, ["e2e", "hf"], tmp_path / "new")
    assert part.name == "nvidia-h200-2026-01-31-abc1234-e2e+hf.json"
    for rows in (1, 2):
        keep({**summary, "rows": rows}, part)
    assert json.loads(part.read_text()) == {**summary, "rows": 2}
    assert list(part.parent.iterdir()) == [part]


@pytest.mark.parametrize(
    ("model", "tokens", "batch", "in_turns", "overlapped"),
    [
        ("large-v3", 20, 1, 84, 116),
        ("large-v3", 20, 64, 220, 305),
        ("large-v3", 120, 16, 75.6, 101),
        ("large-v3-turbo", 20, 64, 323, 342),
        ("large-v3-turbo", 120, 64, 253, 342),
    ],
)
def test_the_limits_of_one_h200_are_those_of_the_design(
    model: str, tokens: int, batch: int, in_turns: float, overlapped: float
) -> None:
    limits = H200.windows_per_s(SHAPES[model], tokens, batch)
    assert limits == pytest.approx((in_turns, overlapped), rel=0.006, abs=0.6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs_on_a_cpu(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmark.gpu", "--smoke", "--device", "cpu", "--out", tmp_path],
        cwd=gpu.ROOT,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert list(summary["sections"]) == ["prepare", *gpu.WEIGHTS]
    assert not any("out of time" in rows for rows in summary["sections"].values())
    assert summary["sections"]["correct"]["wrong"] == []
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == summary
