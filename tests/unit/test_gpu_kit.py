"""Kernels compiled without a GPU, and the folder of wheels for a GPU machine without a network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu_kit.__main__ import HERE, MOST_MIB, build, faults, mebibytes
from tests.gpu_kit.flashinfer_wheel import make_wheel
from tests.gpu_kit.kernels import ARCHITECTURES, ask_for_kernels, compile_kernels
from tests.gpu_kit.packages import installed, requirements
from tests.support.gpu.flashinfer_on_cpu import flashinfer_on_cpu

needs_toolkit = pytest.mark.skipif(
    not (installed("gpu-check") and installed("gpu-kernels")),
    reason="needs flashinfer and CUDA's compiler (`make gpu-kernels` fetches them)",
)


def test_extras_are_pinned_as_the_tests_ran() -> None:
    lines = requirements(["gpu-check"])
    assert all("==" in line for line in lines)
    assert lines[0].startswith("flashinfer-python==0.7.")


def test_a_trimmed_wheel_installs(tmp_path: Path) -> None:
    info = "flashinfer_python-0.7.2.dist-info"
    files = {
        "flashinfer/__init__.py": "",
        "flashinfer/data/csrc/page.cu": "ours",
        "flashinfer/data/csrc/moe/other.cu": "not ours",
        "flashinfer/data/cutlass/include.h": "not ours",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n",
        f"{info}/licenses/LICENSE": "Apache",
    }
    for name, text in files.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_text(text)
    library = tmp_path / "page.so"
    library.write_bytes(b"compiled")
    wheel = make_wheel({"page": library}, "sm90a", tmp_path, tmp_path / "there")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", tmp_path / "site", wheel], check=True)
    data = tmp_path / "site" / "flashinfer" / "data"
    found = {str(file.relative_to(data)) for file in data.rglob("*") if file.is_file()}
    assert found == {"csrc/page.cu", "aot/page/page.so"}
    assert zipfile.ZipFile(wheel).testzip() is None


@needs_toolkit
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: str) -> None:
    libraries = compile_kernels(arch)
    kinds = {name.partition("_with_")[0] for name in libraries}
    assert kinds == {"page", "batch_decode", "batch_prefill"}


@needs_toolkit
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kit_is_small_and_brings_every_kernel(tmp_path: Path) -> None:
    build(tmp_path, HERE, "9.0a")
    assert mebibytes(tmp_path) <= MOST_MIB
    with flashinfer_on_cpu() as asked:
        ask_for_kernels(asked)
    assert faults(tmp_path, HERE, sorted(asked.specs)) == []
