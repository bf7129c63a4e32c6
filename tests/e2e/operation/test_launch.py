"""A cluster on several hosts (network namespaces), as an operator brings it up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.demo.samples import sample_path, sample_text
from cluster.serve.distribution import package_root
from tests.e2e.conftest import wait_until
from tests.support.hosts import NETWORK, Host, hosts, missing_for_hosts

MISSING = missing_for_hosts()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

URL = f"http://{NETWORK}.11:8000"
UP_S = 240.0


@dataclass(frozen=True, slots=True)
class Launched:
    operator: Host
    head: Host
    encoder: Host
    decoder: Host
    said: str

    def transcribe(self) -> subprocess.CompletedProcess[str]:
        return self.operator.run(
            f"curl -s {URL}/v1/audio/transcriptions "
            f"-F model=whisper-1 -F file=@{sample_path('short')}"
        )


def is_empty(host: Host) -> bool:
    if left := host.processes():
        raise AssertionError("\n".join(left))
    return True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel") / "dist"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder]
    subprocess.run([*build, package_root()], check=True)
    shutil.copy(package_root() / "constraints.txt", folder)
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(folder, "operator", "head", "encoder", "decoder") as (operator, *others):
        shutil.copytree(wheel, operator.home / "dist")
        operator.run("splitscribe/bin/pip install -q --no-deps --no-index dist/*.whl")
        operator.run("echo 'export PATH=~/splitscribe/bin:$PATH' >> ~/.bashrc")
        operator.run(
            "splitscribe config show cluster/onprem > cluster.yaml; "
            "sed -i 's/10.0.0.12/NETWORK.13/; s/10.0.0.11/NETWORK.12/; s/10.0.0.10/NETWORK.11/; "
            "s/ssh_user: ubuntu/ssh_user: root/' cluster.yaml; "
            "splitscribe config show serve/cpu > serve.yaml; "
            "sed -i 's/# node_labels/node_labels/' serve.yaml".replace("NETWORK", NETWORK)
        )
        up = operator.run("splitscribe up cluster.yaml --serve serve.yaml", UP_S)
        yield Launched(operator, *others, up.stdout + up.stderr)


def test_a_cluster_comes_up_and_tells_where_it_answers(launched: Launched) -> None:
    assert "made the cluster's token" in launched.said
    assert "nodes: decoder 1, encoder 1, of 2" in launched.said
    assert f"ready at {URL}" in launched.said


def test_a_request_crosses_hosts_over_tcp(launched: Launched) -> None:
    answer = json.loads(launched.transcribe().stdout)
    assert answer["text"] == sample_text("short")
    for host, role in ((launched.encoder, "encoder"), (launched.decoder, "decoder")):
        assert any(f"ray::ServeReplica:splitscribe:{role}" in one for one in host.processes())
    assert not any("ServeReplica" in one for one in launched.head.processes())
    health = json.loads(launched.operator.run(f"curl -s {URL}/health").stdout)
    assert health["pools"]["decoder"]["workers"][0]["transport"] == "nixl/tcp"


def test_status_tells_nodes_workers_and_the_url(launched: Launched) -> None:
    said = launched.operator.run("splitscribe status --cluster cluster.yaml").stdout
    for host, pool in ((launched.head, "head"), (launched.encoder, "encoder")):
        assert any(pool in line and host.address in line for line in said.splitlines())
    assert "1 of 1 running" in said
    assert URL in said


def test_a_deployment_that_fails_says_why_and_leaves_the_old_one(launched: Launched) -> None:
    launched.operator.run("sed 's/model: demo/model: \\/no\\/such/' serve.yaml > bad.yaml")
    bad = launched.operator.run("splitscribe deploy bad.yaml --cluster cluster.yaml", 120, False)
    assert bad.returncode == 1
    assert "/no/such" in bad.stderr
    assert "keeps serving" in bad.stderr
    assert sample_text("short") in launched.transcribe().stdout


def test_a_file_that_does_not_fit_is_refused_before_anything_is_touched(launched: Launched) -> None:
    launched.operator.run("sed 's/worker_ips/worker_ip/' cluster.yaml > bad-cluster.yaml")
    bad = launched.operator.run("splitscribe up bad-cluster.yaml", check=False)
    assert bad.returncode == 1
    assert "worker_ips" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_a_setup_that_fails_is_told_with_what_to_do(launched: Launched) -> None:
    failing = "setup_commands:\\n  - python3 -m no_such_module"
    launched.operator.run(f"sed 's/^setup_commands:/{failing}/' cluster.yaml > s.yaml")
    bad = launched.operator.run("splitscribe up s.yaml", 120, False)
    assert bad.returncode == 1
    assert "No module named no_such_module" in bad.stderr
    assert "`ray up` failed; its last lines say why" in bad.stderr.splitlines()[-1]
    assert "its head may already set up the other nodes" in bad.stderr.splitlines()[-1]


def test_down_leaves_nothing(launched: Launched) -> None:
    """Last: the failed setup has cost the other nodes, and Serve waits for workers there."""
    status = "splitscribe status --cluster cluster.yaml"
    wait_until(
        lambda: "none, of 2" in launched.operator.run(status, check=False).stdout,
        60,
        "the nodes to be gone",
    )
    down = launched.operator.run("splitscribe down --yes cluster.yaml", 60)
    assert "the application is stopped" in down.stderr
    assert f"{launched.decoder.address}: Ray stopped" in down.stderr
    assert "nothing is left" in down.stderr
    for host in (launched.head, launched.encoder, launched.decoder):
        wait_until(lambda host=host: is_empty(host), 30, f"no process on {host.name}")
    gone = launched.operator.run("splitscribe status --cluster cluster.yaml", check=False)
    assert gone.returncode == 1
    assert "is the cluster up?" in gone.stderr
