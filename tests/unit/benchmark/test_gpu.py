"""What can be said of the GPU's benchmark on a CPU: that all of it runs, and survives itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmark.gpu import __main__ as gpu
from benchmark.gpu.rig import Served
from benchmark.gpu.serving import closed_loop, latencies, poisson
from cluster.messages import DecodeTimings

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


async def test_arrivals_do_not_wait_for_answers() -> None:
    served = await poisson(one, 200.0, 0.2)
    assert served
    alone, rate = await closed_loop(one, 1, 0.001)  # shorter than a request
    assert len(alone) == 1
    assert rate > 0


def test_a_section_that_fails_or_hangs_costs_only_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], timeout: float, **options: Any) -> Any:
        name = command[command.index("--child") + 1]
        (tmp_path / f"{name}.json").write_text(json.dumps({"windows/s": 3.0}))
        if name == "encoder":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, -6 if name == "decoder" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    args = gpu.parse(["--sections", "encoder,decoder,e2e"])
    args.device = "cuda"
    results = gpu.run_sections(["encoder", "decoder", "e2e"], args, tmp_path)
    assert results["encoder"]["failed"] == "hung, and was ended"
    assert results["decoder"]["failed"] == "exit status -6"
    assert "failed" not in results["e2e"]
    assert all(rows["windows/s"] == 3.0 for rows in results.values())
    gpu.print_table(results)
    assert "hung" in capsys.readouterr().out


def test_results_are_kept_by_device_date_and_commit(tmp_path: Path) -> None:
    summary = {"device": "NVIDIA H200", "date": "2026-01-31", "commit": "abc1234"}
    assert gpu.keep(summary, list(gpu.SHARES), tmp_path).name == (
        "nvidia-h200-2026-01-31-abc1234.json"
    )
    part = gpu.keep(summary, ["e2e", "hf"], tmp_path)
    assert part.name == "nvidia-h200-2026-01-31-abc1234-e2e+hf.json"
    assert json.loads(part.read_text()) == summary


def test_all_sections_fit_the_time() -> None:
    assert 0.9 < sum(gpu.SHARES.values()) < 0.95
    with pytest.raises(SystemExit):
        gpu.parse(["--sections", "encoder,nothing"])
    assert isinstance(gpu.parse([]), argparse.Namespace)


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
    assert list(summary["sections"]) == ["prepare", *gpu.SHARES]
    assert not any("out of time" in rows for rows in summary["sections"].values())
    assert summary["sections"]["correct"]["wrong"] == []
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == summary
