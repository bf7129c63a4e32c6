"""Which of a host's networks KV may take, and that calls of replicas take no proxy."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from ray._private.grpc_utils import init_grpc_channel

from cluster.serve.ray_environment import ENVIRONMENT
from cluster.serve.replicas.replica_setup import keep_to_network, kv_devices, rdma_ports

FOUND = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("203.0.113.7", "2001:db8::7"),
    "eth1": ("10.1.0.7",),
    "ib0": ("10.2.0.7",),
}
RDMA = ("mlx5_0:1", "mlx5_1:1")


@pytest.mark.parametrize(
    ("node_address", "devices"),
    [
        ("10.1.0.7", "eth1,mlx5_0:1,mlx5_1:1"),
        ("127.0.0.1", "lo"),
        ("2001:db8::7", "eth0,mlx5_0:1,mlx5_1:1"),
        ("192.0.2.1", ""),
    ],
)
def test_kv_keeps_to_the_cluster_s_network(node_address: str, devices: str) -> None:
    assert kv_devices(node_address, FOUND, RDMA) == devices


def test_rdma_ports_that_are_up_are_found(tmp_path: Path) -> None:
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE"), ("mlx5_1/ports/1", "1: DOWN")):
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(f"{state}\n")
    assert rdma_ports(tmp_path) == ("mlx5_0:1",)
    assert rdma_ports(tmp_path / "nothing") == ()


def test_what_the_operator_says_to_ucx_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cluster.serve.replicas.replica_setup.bind_replica_port", lambda address: None
    )
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    keep_to_network(has_kv=True)
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_7:1"
    monkeypatch.delenv("UCX_NET_DEVICES")
    keep_to_network(has_kv=True)
    assert os.environ["UCX_NET_DEVICES"] == "lo"


async def test_replicas_are_called_past_a_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (ENVIRONMENT | {"http_proxy": "http://127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    server = grpc.aio.server()
    say = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    handler = grpc.method_handlers_generic_handler("Echo", {"Say": say})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = init_grpc_channel(f"127.0.0.1:{port}", asynchronous=True)  # as Serve makes its own
    try:
        assert await channel.unary_unary("/Echo/Say")(b"hello", timeout=20.0) == b"hello"
    finally:
        await channel.close()
        await server.stop(None)
