"""Cluster files: what Ray would find out late is told before any machine is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.cli.config import shipped_config
from cluster.cli.operate.dashboard import Node
from cluster.cli.operate.files import (
    CLOUD_MODULES,
    check_sources,
    ensure_token,
    read_cluster_file,
    read_token,
)
from cluster.cli.operate.steps import all_there, pools_line
from cluster.common.errors import ConfigurationError


def written(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    text = shipped_config(f"cluster/{name}").path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_onprem_is_its_addresses(tmp_path: Path) -> None:
    file = read_cluster_file(written(tmp_path, "onprem"))
    assert file.is_onprem
    assert file.head_address == "10.0.0.10"
    assert file.worker_addresses == ("10.0.0.11", "10.0.0.12")
    assert file.environment()["RAY_UP_enable_autoscaler_v2"] == "0"
    key = str(Path("~/.ssh/id_ed25519").expanduser())
    assert file.ssh("10.0.0.11")[-3:] == ["-i", key, "ubuntu@10.0.0.11"]


def test_a_cloud_is_the_least_of_each_pool(tmp_path: Path) -> None:
    file = read_cluster_file(written(tmp_path, "aws", ("min_workers: 0", "min_workers: 2")))
    assert file.least_nodes == {"router": 1, "encoder": 3, "decoder": 1}
    nodes = [Node("a", "head", True), Node("b", "encoder", False), Node("c", "router", False)]
    assert pools_line(file, nodes) == "router 1 of 1, encoder 1 of 3, decoder 0 of 1"
    assert not all_there(file, nodes)
    more = [Node(str(i), pool, False) for i, pool in enumerate(["encoder", "encoder", "decoder"])]
    assert all_there(file, nodes + more)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("onprem", ("head_ip: 10.0.0.10", ""), "head_ip"),
        ("onprem", ("cluster_name: splitscribe", "cluster_nam: x"), "cluster_nam"),
        ("aws", ("max_workers: 20", "max_workers: 1"), "max_workers"),
        ("aws", ("head_node_type: head", "head_node_type: boss"), "head_node_type"),
        ("aws", ("provider:", "provider: ["), "not YAML"),
    ],
)
def test_what_the_launcher_would_refuse_is_one_line(
    tmp_path: Path, name: str, change: tuple[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_cluster_file(written(tmp_path, name, change))


def test_what_is_to_be_copied_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = read_cluster_file(written(tmp_path, "onprem"))
    with pytest.raises(ConfigurationError, match="ssh_private_key"):
        check_sources(file)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text("")
    with pytest.raises(ConfigurationError, match="make wheel"):
        check_sources(file)
    (tmp_path / "dist").mkdir()
    for name in ("splitscribe-1-py3-none-any.whl", "constraints.txt"):
        (tmp_path / "dist" / name).write_text("")
    with pytest.raises(ConfigurationError, match="auth_token"):
        check_sources(file)
    assert ensure_token()
    assert not ensure_token()
    check_sources(file)
    (tmp_path / "dist" / "splitscribe-2-py3-none-any.whl").write_text("")
    with pytest.raises(ConfigurationError, match=r"splitscribe-1.*splitscribe-2"):
        check_sources(file)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_cloud_needs_its_package(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLOUD_MODULES, cloud, "no_such_module")
    file = read_cluster_file(written(tmp_path, cloud))
    with pytest.raises(ConfigurationError, match=rf"pip install .*\[{cloud}\]"):
        check_sources(file)


def test_the_token_is_the_operators_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_token({}) is None
    ensure_token()
    path = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read_token({}) == path.read_text()
    assert read_token({"RAY_AUTH_TOKEN": "other"}) == "other"
