"""The groups that `make test-slow` runs hold every test file, each once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_file_is_in_one_group_of_slow_tests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    groups = dict(re.findall(r"^SLOW_([\w-]+) := (.+)$", makefile, re.MULTILINE))
    assert groups.pop("GROUPS").split() == list(groups)
    counts: Counter[Path] = Counter()
    for named in groups.values():
        for pattern in re.sub(r"\$\(wildcard (\S+)\)", r"\1", named).split():
            found = sorted(ROOT.glob(pattern))
            assert found, f"{pattern} is not there"
            for path in found:
                counts.update(path.rglob("test_*.py") if path.is_dir() else [path])
    there = set((ROOT / "tests").rglob("test_*.py")) - set((ROOT / "tests/gpu").rglob("*.py"))
    assert counts == Counter(there)
