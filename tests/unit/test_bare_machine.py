"""The GPU's tests and benchmark run where there is no Ray, no NIXL and no tool of development."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_kit.bare import bare_environment, brought_along

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ("correct", "decode", "serving", "rig")


def run_bare(folder: Path, *arguments: str, seconds: float = 110.0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=bare_environment(folder),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_kit_brings_what_is_missing_and_no_more() -> None:
    brought = brought_along()
    assert {"pydantic", "pydantic-core", "librosa", "pytest-asyncio"} <= set(brought)
    assert not {"torch", "numpy", "numba", "ray", "nixl-cu13", "fastapi"} & set(brought)


@pytest.mark.slow
def test_all_gpu_tests_are_collected_and_the_benchmark_imports(tmp_path: Path) -> None:
    """By `pytest -m gpu`; the benchmark's modules are given as plugins: that imports them."""
    imports = (part for name in BENCHMARK for part in ("-p", f"benchmark.gpu.{name}"))
    collect = ("-m", "pytest", *imports, "-m", "gpu", "--collect-only", "-q")
    listed = run_bare(tmp_path, *collect)
    files = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", file.read_text()) and file != Path(__file__)
    }
    assert marked <= files
    assert "tests/contract/test_kv_transfer.py" in files  # by its room's fixtures


def test_the_benchmark_helps(tmp_path: Path) -> None:
    assert "--sections" in run_bare(tmp_path, "-m", "benchmark.gpu", "--help")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_and_benchmark_run(tmp_path: Path) -> None:
    colocated = "tests/unit/serve/test_replicas.py"
    assert "passed" in run_bare(tmp_path, "-m", "pytest", "-q", colocated, seconds=280.0)
    sections = ("--smoke", "--device", "cpu", "--sections", "correct,overlap")
    run_bare(tmp_path, "-m", "benchmark.gpu", *sections, seconds=280.0)
