"""SECURITY.md lists what is installed, and names tests that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_dependency_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["bulk"], *extras["otel"]]
    names = {re.split(r"[\[<>=;, ]", one)[0] for one in wanted}
    listed = set(re.findall(r"[\w-]+", PAGE.partition("## Dependencies")[2]))
    assert names <= listed


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(named) > 8
    assert not [name for name in named if not (ROOT / name).is_file()]
