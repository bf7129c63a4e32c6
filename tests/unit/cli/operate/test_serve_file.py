"""Serve configurations are checked before they are sent."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from cluster.cli.config import shipped_config
from cluster.cli.operate.files import read_serve_file
from cluster.common.errors import ConfigurationError
from cluster.serve.from_file import build


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("import_path: cluster.serve.from_file:build", "import_path: other:app", "import_path"),
        ("route_prefix: /", "route_prefix: /\n    host: 0.0.0.0", "Host"),
        ("model: demo", "modle: demo", "modle"),
        ("applications:", "application:", "applications"),
        ("name: splitscribe", "name: mine", "name splitscribe"),
    ],
)
def test_what_would_fail_on_the_cluster_is_told_here(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    text = shipped_config("serve/cpu").path.read_text()
    assert old in text
    file = tmp_path / "serve.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigurationError, match=named):
        read_serve_file(file)


def test_the_import_path_of_a_shipped_file_is_the_build() -> None:
    application = read_serve_file(shipped_config("serve/cpu").path).content["applications"][0]
    module, _, name = application["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is build
