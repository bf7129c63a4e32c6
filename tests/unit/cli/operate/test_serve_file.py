"""Serve configurations are checked before they are sent."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cluster.cli.operate.serve_file import read_serve_file
from cluster.cli.shipped import shipped_config
from cluster.errors import ConfigurationError
from cluster.serve.from_file import FORMER_IMPORT_PATH, IMPORT_PATH, build


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("import_path: cluster.serve.from_file:build", "import_path: other:app", "import_path"),
        ("route_prefix: /", "route_prefix: /\n    host: 0.0.0.0", "Host"),
        ("model: demo", "modle: demo", "modle"),
        ("applications:", "application:", "applications"),
        ("      model: demo", "      router: {api_key: secret}", "api_key_file"),
    ],
)
def test_what_would_fail_on_the_cluster_is_told_here(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    text = shipped_config("serve/cpu").path.read_text()
    assert old in text
    file = tmp_path / "serve.yaml"
    lines = text.replace(old, new)
    if "router: {" in new:
        lines = lines.replace("      router:\n", "")
    file.write_text(lines)
    with pytest.raises(ConfigurationError, match=named):
        read_serve_file(file)


def test_the_former_import_path_works_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file is read, and on the node where Serve imports it."""
    file = tmp_path / "serve.yaml"
    text = shipped_config("serve/cpu").path.read_text()
    file.write_text(text.replace(IMPORT_PATH, FORMER_IMPORT_PATH))
    with pytest.warns(FutureWarning, match=IMPORT_PATH):
        assert read_serve_file(file).content["applications"][0]["import_path"] == FORMER_IMPORT_PATH
    module, _, name = FORMER_IMPORT_PATH.partition(":")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(FutureWarning, match=IMPORT_PATH):
        assert getattr(importlib.import_module(module), name) is build
