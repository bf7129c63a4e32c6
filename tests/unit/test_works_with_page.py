"""configs/WORKS-WITH.md names exactly the programs and versions that the slow tests run or send."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.works_with.programs import INSTALLED
from tests.e2e.works_with.recorded import ALL

PAGE = (Path(__file__).parents[2] / "configs/WORKS-WITH.md").read_text()
ROW = re.compile(
    r"^\| (?!program|---)(.+?) \| (.+?) \| (installed|recorded): (.+?) \|$", re.MULTILINE
)


def rows(kind: str) -> list[str]:
    return [version for _, _, found, version in ROW.findall(PAGE) if found == kind]


def test_what_is_said_to_be_installed_is_of_the_version_that_is_tested() -> None:
    pins = dict(
        re.sub(r"\[.*\]", "", pin).split("==")
        for program in INSTALLED
        for pin in program.requirements
    )
    told = re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", ", ".join(rows("installed")))
    assert [(name, pins[name]) for name, _ in told if name in pins] == [
        (name, version) for name, version in told if name in pins
    ]
    assert pins.keys() - dict(told).keys() == {"openai", "pydub"}, "what others need beside them"


def test_what_is_recorded_is_of_the_version_that_was_read() -> None:
    told = rows("recorded")
    for program, version in {(one.program, one.version) for one in ALL}:
        assert any(text.startswith(f"{program} {version}") for text in told), (program, version)
    assert len(told) == len({one.program for one in ALL})


def test_every_row_has_three_lines_of_settings() -> None:
    for name, settings, _, _ in ROW.findall(PAGE):
        assert settings.count("<br>") == 2, name
