"""The GPU's tests and benchmark run where there is no Ray, no NIXL and no tool of development."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.gpu_kit.__main__ import faults
from tests.gpu_kit.bare import (
    MACHINE,
    PYTHON,
    bare_environment,
    brought_along,
    environment_of,
)

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


def test_what_the_machine_has_suits_us_and_what_is_brought() -> None:
    """Its torch and triton, though others are installed here, for its Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["gpu-check"]]
    needs += [line for name in brought_along() for line in distribution(name).requires or []]
    for one in map(Requirement, needs):
        if (version := MACHINE.get(one.name)) and (
            not one.marker or one.marker.evaluate(environment_of(PYTHON))
        ):
            assert one.specifier.contains(version), f"{one}, and there is {version}"


def test_a_kit_is_looked_through(tmp_path: Path) -> None:
    """A wheel of another Python, one that is missing, and kernels that are, or are too many."""
    for name in brought_along()[1:]:
        tag = "cp311-cp311-linux_x86_64" if name == "pydantic-core" else "py3-none-any"
        (tmp_path / f"{name.replace('-', '_')}-1.0-{tag}.whl").touch()
    (tmp_path / "apache_tvm_ffi-0.1-cp312-cp312-linux_x86_64.whl").touch()
    with zipfile.ZipFile(tmp_path / "flashinfer_python-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/data/aot/page/page.so", bytes(200_000))
        wheel.writestr("flashinfer/data/aot/decode/decode.so", b"")
    assert faults(tmp_path, "3.12", ["page", "prefill"]) == [
        "no kernel prefill",
        "nobody asked for decode",
        "decode.so is empty",
        "pydantic_core-1.0-cp311-cp311-linux_x86_64.whl is not for Python 3.12",
        f"no wheel of {brought_along()[0]}",
    ]


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
    sections = ("--smoke", "--device", "cpu", "--sections", "correct,e2e")
    run_bare(tmp_path, "-m", "benchmark.gpu", *sections, seconds=280.0)
