"""What can be said of the GPU's benchmark on a CPU: that all of it runs, and survives itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from weakref import ref

import pytest

from benchmark.gpu import __main__ as gpu
from benchmark.gpu.__main__ import file_of, keep
from benchmark.gpu.predicted import H200
from benchmark.gpu.rig import SMOKE, Rig, Served
from benchmark.gpu.serving import closed_loop, latencies
from benchmark.shared.flops import SHAPES


async def one() -> Served:
    begun = time.perf_counter()
    await asyncio.sleep(0.01)
    return Served(begun, time.perf_counter())


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    served, rate = await closed_loop(one, 4, 0.3)
    assert 0 < rate <= 4 / 0.01
    row = latencies(served)
    assert row["requests"] == len(served)
    assert 10 <= row["e2e_p50_ms"] <= row["e2e_p99_ms"]


async def test_a_loop_shorter_than_a_request_counts_the_one() -> None:
    alone, rate = await closed_loop(one, 1, 0.001)  # shorter than a request
    assert len(alone) == 1
    assert rate > 0


CHILD = """
import json, pathlib, sys, time
name, file = sys.argv[1:]
summary = json.loads(pathlib.Path(file).read_text())
summary["sections"][name] = {"windows/s": 3.0}
pathlib.Path(file).write_text(json.dumps(summary))
time.sleep(60 if name == "encoder" else 0)
sys.exit(6 if name == "decoder" else 0)
"""


def run_scripted(file: Path, *names: str) -> tuple[int, dict[str, gpu.Rows]]:
    def command(name: str) -> list[str]:
        return [sys.executable, "-c", CHILD, name, str(file)]

    status = gpu.run_sections(names, file, 3.0, command)
    return status, json.loads(file.read_text())["sections"]


def test_a_section_that_fails_or_hangs_costs_only_its_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    keep({"sections": {}}, file)
    begun = time.monotonic()
    status, sections = run_scripted(file, "encoder", "decoder", "e2e")
    assert time.monotonic() - begun < 50, "the section that hung was not ended"
    assert status == 1
    assert sections["encoder"]["failed"] == "took longer than 3 s"
    assert sections["decoder"]["failed"] == "exit status 6"
    assert "failed" not in sections["e2e"]
    assert all(rows["windows/s"] == 3.0 for rows in sections.values())


def test_nothing_is_measured_of_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    keep({"sections": {"correct": {"wrong": ["KV"], "failed": "RuntimeError: KV"}}}, file)
    status, sections = run_scripted(file, "e2e")
    assert status == 1
    assert list(sections) == ["correct"]
    status, sections = run_scripted(file, "correct", "e2e")
    assert status == 0, "an earlier run's rows count although it was compared again"
    assert list(sections) == ["correct", "e2e"]


def test_results_are_kept_by_device_date_and_commit(tmp_path: Path) -> None:
    summary = {"device": "NVIDIA H200", "date": "2026-01-31", "commit": "abc1234"}
    file = file_of(summary, tmp_path / "new")
    assert file.name == "nvidia-h200-2026-01-31-abc1234.json"
    for rows in (1, 2):
        keep({**summary, "rows": rows}, file)
    assert json.loads(file.read_text()) == {**summary, "rows": 2}
    assert list(file.parent.iterdir()) == [file]


def test_the_predictions_are_those_of_the_page_and_near_what_was_measured() -> None:
    """Of an H200, in milliseconds by rows: within an eighth."""
    shape = SHAPES["large-v3"]
    page = (gpu.ROOT / "benchmark" / "gpu" / "README.md").read_text()
    assert f"{1000 * H200.encode_s(shape):.1f} ms a window" in page
    for batch, measured_ms in (
        (1, "2.36"),
        (16, "3.46"),
        (32, "4.53"),
        (64, "6.30"),
        (128, "10.4"),
    ):
        step_ms = 1000 * H200.step_s(shape, 120, batch)
        assert f"{step_ms:.3g}" in page
        assert measured_ms in page
        assert step_ms == pytest.approx(float(measured_ms), rel=1 / 8)
    assert f"{H200.windows_per_s(shape, 66, 64):.0f} windows/s" in page


def test_a_pair_that_is_still_held_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    """A device has no room for the pools of two."""
    with Rig(SMOKE, "cpu", tmp_path).pair("micro", max_batch=1, encode_batch=1, windows=1) as pair:
        pools = [ref(part.pool.tensor) for part in (pair.exporter, pair.importer)]
    assert [pool() for pool in pools] == [None, None]


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
    assert list(summary["sections"]) == list(gpu.SECTIONS)
    assert summary["sections"]["correct"]["wrong"] == []
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == summary
