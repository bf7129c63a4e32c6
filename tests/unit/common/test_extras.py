"""What people are told to type installs an extra from where this installation comes from."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cluster.common import extras
from cluster.common.errors import ConfigurationError
from cluster.common.extras import install_command, require_extra
from cluster.serve.distribution import package_root

PIP = [sys.executable, "-m", "pip", "install"]


def test_a_checkout_installs_itself_from_any_folder() -> None:
    assert shlex.split(install_command("bulk")) == [*PIP, "-e", f"{package_root()}[bulk]"]
    assert shlex.split(install_command()) == [*PIP, "-e", str(package_root())]


def test_a_wheel_is_installed_again_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "cluster" / "common" / "extras.py"))
    wheel = f"splitscribe-{version('splitscribe')}-py3-none-any.whl"
    assert shlex.split(install_command("gpu")) == [*PIP, f"{wheel}[gpu]"]


def test_without_an_extra_one_sentence_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_extra("bulk", "json")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pyarrow: .* -m pip install .*\[bulk\]"):
        require_extra("bulk", "json", "pyarrow")


def test_nothing_tells_anyone_to_install_what_pypi_does_not_have() -> None:
    root = package_root()
    folders = ("cluster", "router", "encoder_worker", "decoder_worker", "configs", "benchmark")
    files = [file for name in folders for file in (root / name).rglob("*") if file.is_file()]
    texts = {".py", ".md", ".yaml", ".js", ".html", ".Dockerfile"}
    for file in (*files, *root.glob("*.md"), root / "Makefile"):
        if file.suffix in texts or file.name == "Makefile":
            assert not re.search(r"pip install ['\"]?splitscribe\b(?!-)", file.read_text()), file
