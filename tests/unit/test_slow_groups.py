"""The groups that `make test-slow` runs hold every test file, each once."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_every_test_file_is_in_one_group_of_slow_tests() -> None:
    counts: Counter[Path] = Counter()
    for named in paths_of_all_groups():
        path = ROOT / named
        assert path.exists(), f"{named} is not there"
        counts.update(path.rglob("test_*.py") if path.is_dir() else [path])
    there = set((ROOT / "tests").rglob("test_*.py")) - set((ROOT / "tests/gpu").rglob("*.py"))
    assert counts == Counter(there)


def paths_of_all_groups() -> list[str]:
    """What `make test-slow` hands to pytest when it runs every group."""
    shown = ["make", "--dry-run", "--no-print-directory", "test-slow"]
    lines = subprocess.check_output(shown, cwd=ROOT, text=True).splitlines()
    return shlex.split(lines[-1].partition(" -m pytest -m ")[2])[1:]
