"""What `check --compile` compiles is all that workers then need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.common.kernels.cpu.cache import VARIABLE
from cluster.demo.samples import sample_path

COMMAND = (sys.executable, "-m", "cluster.cli.main")


def kept_in(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if file.suffix in (".nbi", ".nbc")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_compiles_nothing_after_it(tmp_path: Path) -> None:
    """Neither at its start nor in its first requests, whose arrays have types of their own."""
    folder = tmp_path / "kernels"
    environment = {**os.environ, VARIABLE: str(folder)}
    checked = subprocess.run(
        [*COMMAND, "check", "--compile"], env=environment, capture_output=True, text=True
    )
    assert "decoder " in checked.stdout
    assert "not compiled" not in checked.stdout
    compiled = kept_in(folder)
    assert compiled
    asked = ["transcribe", str(sample_path("medium")), "-o", str(tmp_path), "--model", "demo"]
    asked += ["--device", "cpu", "--language", "en"]
    in_8_bits = {**environment, "SPLITSCRIBE_KV_DTYPE": "float8"}
    for further, env in (
        ((), environment),
        (("--beam-size", "3", "--word-timestamps"), environment),
        (("--fp16", "False"), environment),
        ((), in_8_bits),
        (("--fp16", "False"), in_8_bits),
    ):
        subprocess.run([*COMMAND, *asked, *further], env=env, check=True, capture_output=True)
        assert kept_in(folder) == compiled, further
