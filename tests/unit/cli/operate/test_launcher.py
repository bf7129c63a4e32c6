"""`ray down` for real, of machines that nobody can reach: what a person is told, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.cli.config import shipped_config
from cluster.cli.operate import steps
from cluster.cli.operate.files import ClusterFile, read_cluster_file
from cluster.common.errors import ConfigurationError
from tests.support.programs import needs

pytestmark = needs("ssh")


@pytest.fixture
def unreachable(tmp_path: Path) -> ClusterFile:
    content = yaml.safe_load(shipped_config("cluster/onprem").path.read_text())
    content["cluster_name"] = f"unreachable-{tmp_path.name}"
    content["auth"] = {"ssh_user": "nobody", "ssh_proxy_command": "false"}
    content["file_mounts"] = {}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    return read_cluster_file(file)


def test_machines_that_were_not_reached_are_named(
    unreachable: ClusterFile, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with pytest.raises(ConfigurationError) as caught:
        steps.run_ray_down(unreachable, said.append)
    assert "Ray may still run on 10.0.0.10, 10.0.0.11, 10.0.0.12" in caught.value.message
    assert "ray stop --force" in caught.value.message
    assert said == []
    assert "Destroying cluster" in capfd.readouterr().err


def test_a_launcher_that_hangs_is_ended(
    unreachable: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "DOWN_S", 0.2)
    with pytest.raises(ConfigurationError, match=r"still ran after 0 s\. Ray may still run on"):
        steps.run_ray_down(unreachable, print)
