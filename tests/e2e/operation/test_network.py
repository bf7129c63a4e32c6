"""What listens where, on a host (a network namespace) with networks for clients and the cluster."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli.config import shipped_config
from cluster.demo.samples import sample_path, sample_text
from cluster.serve.distribution import package_root
from cluster.serve.from_file import IMPORT_PATH
from tests.e2e.conftest import wait_until
from tests.support.hosts import Host, hosts, missing_for_hosts
from tests.support.programs import needs

MISSING = missing_for_hosts()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

OURS, OURS_SUBNET = "10.78.0.11", "10.78.0.0/24"
DASHBOARD = "http://127.0.0.1:8265"
READY_S, STOP_S = 120.0, 60.0
PYTHON = shlex.quote(sys.executable)


@dataclass(frozen=True, slots=True)
class Port:
    address: str
    port: int
    process: str

    @property
    def is_on_loopback(self) -> bool:
        return self.address.startswith(("127.", "::1"))


@dataclass(frozen=True, slots=True)
class Networks:
    client: Host
    host: Host

    def serve(self) -> None:
        command = f"{PYTHON} -m cluster.cli.main serve --host {self.host.address}"
        self.host.run(
            f"export PYTHONPATH={package_root()} RAY_AUTH_MODE=disabled; "
            f"nohup {command} > serve.log 2>&1 & echo $! > serve.pid"
        )
        wait_until(self._is_ready, READY_S, "ready")

    def deploy(self) -> None:
        config = {
            "http_options": {"host": self.host.address, "port": 8000},
            "applications": [
                {
                    "name": "splitscribe",
                    "route_prefix": "/",
                    "import_path": IMPORT_PATH,
                    "args": {"model": "demo"},
                }
            ],
        }
        (self.host.home / "serve.yaml").write_text(json.dumps(config))
        python = f"export PYTHONPATH={package_root()} RAY_AUTH_MODE=disabled; {PYTHON} -m"
        start = f"--head --node-ip-address={OURS} --port=6379 --num-cpus=4"
        self.host.run(f"{python} ray.scripts.scripts start {start}", 90)
        self.host.run(f"{python} ray.serve.scripts deploy serve.yaml --address {DASHBOARD}", 90)
        wait_until(self._answers, READY_S, "ready")

    def _is_ready(self) -> bool:
        if self.host.run("kill -0 $(cat serve.pid)", check=False).returncode:
            raise AssertionError((self.host.home / "serve.log").read_text())
        return self._answers()

    def _answers(self) -> bool:
        return self.client.run(f"curl -sf {self.url}/health", check=False).returncode == 0

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:8000"

    def transcribe(self) -> str:
        text: str = json.loads(
            self.client.run(
                f"curl -s {self.url}/v1/audio/transcriptions "
                f"-F model=whisper-1 -F file=@{sample_path('short')}"
            ).stdout
        )["text"]
        return text

    def listening(self) -> list[Port]:
        found = []  # an IPv4 address may be that of an IPv6 socket
        for line in self.host.run("ss -H -ltunp").stdout.splitlines():
            address, _, port = line.split()[4].rpartition(":")
            process = line.partition('(("')[2].partition('"')[0]
            address = address.strip("[]").partition("%")[0].removeprefix("::ffff:")
            found.append(Port(address, int(port), process))
        return [one for one in found if one.process != "sshd"]


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    with hosts(tmp_path, "client", "serving") as (client, host):
        for command in (
            "link add eth1 type veth peer name far",
            "link set far up",
            "link set eth1 up",
            f"addr add {OURS}/24 dev eth1",
        ):
            host.run(f"ip {command}")
        yield Networks(client, host)


def test_a_server_of_one_machine_opens_its_http_port_and_nothing_else(networks: Networks) -> None:
    networks.serve()
    assert networks.transcribe() == sample_text("short")
    found = networks.listening()
    assert [one for one in found if not one.is_on_loopback] == [
        Port(networks.host.address, 8000, "ray::ServeRepli")
    ]
    assert {"gcs_server", "raylet", "ray::ServeRepli"} <= {one.process for one in found}
    networks.host.run("kill -TERM $(cat serve.pid)")
    wait_until(lambda: not networks.listening(), STOP_S, "every port closed")


@needs("nft")
def test_a_cluster_s_workers_listen_on_its_own_network(networks: Networks) -> None:
    host = networks.host
    networks.deploy()
    assert networks.transcribe() == sample_text("short")
    found = networks.listening()
    assert {one.port for one in found if one.address == host.address} == {8000}
    # Of each replica Serve's port; of an encoder and a decoder NIXL's.
    replicas = [one for one in found if one.process == "ray::ServeRepli" and one.address == OURS]
    assert len(replicas) == 5, "\n".join(map(str, found))
    everywhere = {one.process for one in found if one.address in ("*", "0.0.0.0", "::")}
    assert "gcs_server" in everywhere, "SECURITY.md says that Ray binds its ports everywhere"

    reachable = networks.client.run(reach(host.address, found)).stdout.split()
    assert "6379" in reachable
    rules = shipped_config("firewall/nftables").path.read_text()
    (host.home / "rules").write_text(rules.replace("10.0.0.0/24", OURS_SUBNET))
    host.run("nft -f rules; nft -f rules")
    try:
        reachable = networks.client.run(reach(host.address, found)).stdout.split()
        assert reachable == ["8000"]
        assert networks.transcribe() == sample_text("short")
    finally:
        host.run("nft delete table inet splitscribe")


def reach(address: str, ports: list[Port]) -> str:
    code = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    try: socket.create_connection((sys.argv[1], int(port)), 0.3); print(port)\n"
        "    except OSError: pass\n"
    )
    every = " ".join(str(port) for port in sorted({one.port for one in ports}))
    return f"python3 -c {shlex.quote(code)} {address} {every}"
