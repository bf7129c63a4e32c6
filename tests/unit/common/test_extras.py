"""What people are told to type installs an extra from where this installation comes from."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.common import extras
from cluster.common.extras import install_command
from cluster.serve.distribution import package_root

PIP = [sys.executable, "-m", "pip", "install"]


def test_a_checkout_installs_itself_from_any_folder() -> None:
    assert shlex.split(install_command("bulk")) == [*PIP, "-e", f"{package_root()}[bulk]"]
    assert shlex.split(install_command()) == [*PIP, "-e", str(package_root())]


def test_a_wheel_is_installed_again_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "a folder" / "splitscribe-0.1.0-py3-none-any.whl"
    noted: dict[str, Any] = {"url": wheel.as_uri()}
    found = SimpleNamespace(version="0.1.0", read_text=lambda name: json.dumps(noted))
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "cluster" / "common" / "extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: found)
    assert shlex.split(install_command("gpu")) == [*PIP, f"{wheel.name}[gpu]"]  # it is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert shlex.split(install_command("gpu")) == [*PIP, f"{wheel}[gpu]"]


def test_nothing_tells_anyone_to_install_what_pypi_does_not_have() -> None:
    root = package_root()
    folders = ("cluster", "router", "encoder_worker", "decoder_worker", "configs", "benchmark")
    files = [file for name in folders for file in (root / name).rglob("*") if file.is_file()]
    texts = {".py", ".md", ".yaml", ".js", ".html", ".Dockerfile"}
    for file in (*files, *root.glob("*.md"), root / "Makefile"):
        if file.suffix in texts or file.name == "Makefile":
            assert not re.search(r"pip install ['\"]?splitscribe\b(?!-)", file.read_text()), file
