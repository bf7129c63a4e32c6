"""On two nodes, a window is decoded on the node that encoded it, as long as there is room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from cluster.demo.samples import sample_path
from cluster.serve.ray_environment import ENVIRONMENT
from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

N_REQUESTS = 16
# Claims that leave room for one of each role on a node; nobody looks for the GPU. Every request has
# the same audio, which is to be encoded on either node.
SETTINGS = """
encoder: {replicas: 2, device: cpu, gpus: 0.6, cache: false}
decoder: {replicas: 2, device: cpu, gpus: 0.4}
"""
READ = re.compile(r"splitscribe_decoder (\w+) .*KV from encoder-(\w+)-")


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 128 * 2**20}
    head = node | {"include_dashboard": True, "dashboard_port": free_port()}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


def nodes_of_workers(server: Server) -> dict[str, str]:
    token = Path("~/.ray/auth_token").expanduser().read_text().strip()
    answer = httpx.get(
        f"{server.dashboard()}/api/serve/applications/",
        headers={"Authorization": f"Bearer {token}"},
        timeout=20,
    ).json()
    deployments = answer["applications"]["splitscribe"]["deployments"]
    return {
        replica["replica_id"]: replica["node_id"]
        for name in ("encoder", "decoder")
        for replica in deployments[name]["replicas"]
    }


def test_kv_stays_on_its_node(ray_cluster: Any, tmp_path: Path) -> None:
    logs = Path(ray_cluster.head_node.get_logs_dir_path()) / "serve"
    file = tmp_path / "settings.yaml"
    file.write_text(SETTINGS)
    server = start_server(tmp_path, "--ray-address", ray_cluster.address, "--config", str(file))
    try:
        nodes = nodes_of_workers(server)
        assert len(nodes) == 4
        assert len(set(nodes.values())) == 2
        client = server.client(max_retries=0)
        for _ in range(N_REQUESTS):
            client.audio.transcriptions.create(model="whisper-1", file=sample_path("short"))
        wait_until(lambda: len(reads(logs)) >= N_REQUESTS, 30, "a log line of each read")
        done = reads(logs)
        assert {nodes[encoder] for _, encoder in done} == set(nodes.values()), done
        for decoder, encoder in done:
            assert nodes[decoder] == nodes[encoder]
    finally:
        assert stop_server(server) == 0, server.output()[-4000:]


def reads(logs: Path) -> list[tuple[str, str]]:
    files = logs.glob("replica_splitscribe_decoder*.log")
    found: list[tuple[str, str]] = []
    for file in files:
        found += READ.findall(file.read_text())
    return found
