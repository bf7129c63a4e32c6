"""The check that the pins resolve tells a contradiction from an index that does not answer."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.resolution import EXTRAS, PYTHONS, check, resolve

PROJECT = """
[project]
name = "splitscribe"
version = "0"
dependencies = ["torch"]
optional-dependencies = {dev = [], bulk = [], gpu = []}
"""


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in requires]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    make_wheel(tmp_path, "torch", "2.13.0", "triton==3.7.1")
    make_wheel(tmp_path, "triton", "3.7.1")
    make_wheel(tmp_path, "triton", "3.9.0")
    return tmp_path / "pyproject.toml"


def constraints(project: Path, *pins: str) -> Path:
    file = project.with_name("constraints.txt")
    file.write_text("\n".join(pins))
    return file


def wheels_only(project: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(project.parent))


def test_pins_that_agree_resolve(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = constraints(project, "triton==3.7.1")
    assert check(project, pins, *wheels_only(project)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PYTHONS) * len(EXTRAS)
    assert lines[0] == "Python 3.11, splitscribe: 2 packages, torch==2.13.0, triton==3.7.1"


def test_a_pin_that_another_package_forbids_fails(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = constraints(project, "triton==3.9.0")
    assert check(project, pins, *wheels_only(project)) == 1
    assert "Python 3.13, splitscribe[bulk,gpu]: DOES NOT RESOLVE" in capsys.readouterr().out


def test_an_index_that_does_not_answer_is_said_and_is_no_failure(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    pins = constraints(project, "triton==3.7.1")
    nowhere = ("--default-index", f"http://127.0.0.1:{free_port()}/simple", "--no-cache")
    assert check(project, pins, *nowhere) == 0
    assert capsys.readouterr().out.startswith("Not checked whether the pins resolve")


def test_wheels_that_lie_on_this_machine_are_not_seen(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", str(project.parent))
    found = resolve(project, constraints(project), "3.12", (), "--no-index")
    assert found.contradicts, found
