"""The private names of Ray that we use are there and do their work, and nobody else uses any."""

from __future__ import annotations

import importlib
import os
import re
import socket
from pathlib import Path

import pytest
import ray

from cluster.serve.distribution import CODE_PACKAGES, package_root
from cluster.serve.ray_environment import ONE_MACHINE_ENVIRONMENT
from cluster.serve.ray_internals import (
    DASHBOARD_PARTS,
    KEEP_SIGNALS,
    ONE_MACHINE,
    bind_replica_port,
    look_for_nodes_each,
    ray_on_loopback,
    small_ray_head,
    take_worker_lines,
)

HERE = Path("cluster/serve/ray_internals.py")
NAMES = (
    "ray.autoscaler._private.util.prepare_config",
    "ray.autoscaler._private.util.validate_config",
    "ray.experimental.internal_kv._internal_kv_get",
    "ray.experimental.internal_kv._internal_kv_put",
    "ray._private.worker.global_worker",
)
READERS = {  # of the variables that the process of each node does not read itself
    "RAY_SERVE_": "serve/_private/constants.py",
    "RAY_LOG_MONITOR_": "_private/log_monitor.py",
    "LOG_NAME_": "_private/log_monitor.py",
    "REPORTER_": "dashboard/modules/reporter/reporter_consts.py",
}


@pytest.mark.parametrize("name", NAMES)
def test_ray_still_has_it(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), (
        f"Ray {ray.__version__} has no {name} any more; {HERE} says what it is needed for"
    )


def test_ray_still_reads_the_variable_that_leaves_signals_alone() -> None:
    native = importlib.import_module("ray._raylet").__file__
    assert native is not None
    assert KEEP_SIGNALS.encode() in Path(native).read_bytes(), (
        f"Ray {ray.__version__} does not read {KEEP_SIGNALS} any more; see {HERE}"
    )


@pytest.mark.parametrize("name", ONE_MACHINE_ENVIRONMENT)
def test_ray_still_reads_the_variables_of_one_machine(name: str) -> None:
    root = Path(ray.__file__).parent
    others = (reader for start, reader in READERS.items() if name.startswith(start))
    reader = next(others, "core/src/ray/raylet/raylet")
    assert name.encode() in (root / reader).read_bytes(), f"Ray {ray.__version__} knows no {name}"


def test_no_other_module_uses_private_names_of_ray() -> None:
    private = re.compile(r"\bray(\.\w+)*\._|_internal_kv")
    root = package_root()
    files = [file for name in CODE_PACKAGES for file in (root / name).rglob("*.py")]
    users = {file.relative_to(root) for file in files if private.search(file.read_text())}
    assert users == {HERE}


def test_ray_of_one_machine_has_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import get_node_ip_address

    monkeypatch.delenv(ONE_MACHINE, raising=False)
    before = get_node_ip_address()
    with ray_on_loopback():
        assert get_node_ip_address() == "127.0.0.1"
        assert os.environ[ONE_MACHINE] == "0"
    assert get_node_ip_address() == before
    assert ONE_MACHINE not in os.environ


def test_ray_still_has_the_parts_of_its_dashboard() -> None:
    """It does not start with a part that it does not know."""
    from ray.dashboard.subprocesses.module import SubprocessModule
    from ray.dashboard.utils import get_all_modules

    assert set(DASHBOARD_PARTS) <= {part.__name__ for part in get_all_modules(SubprocessModule)}


def test_a_small_head_is_told_its_parts_and_adds_no_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import node, services

    started: list[list[str]] = []
    monkeypatch.setattr(
        services, "start_ray_process", lambda command, kind, **_: started.append(command)
    )
    options: list[dict[str, object]] = []
    monkeypatch.setattr(services, "start_raylet", lambda *_, **given: options.append(given))

    def parts() -> tuple[object, ...]:
        of_node = node.Node.start_monitor, node.Node.start_api_server
        return services.start_ray_process, services.start_raylet, *of_node

    usual = parts()
    with small_ray_head(DASHBOARD_PARTS):
        services.start_raylet("address", dashboard_agent_listen_port=52365, huge_pages=False)
        services.start_ray_process(["one"], "dashboard", fate_share=True)
        services.start_ray_process(["two"], "raylet")
        assert node.Node.start_monitor(None) is None
        assert node.Node.start_api_server is usual[-1]
    assert started == [["one", "--modules-to-load=NodeHead,ServeHead,StateHead"], ["two"]]
    with small_ray_head():
        assert node.Node.start_api_server(None, include_dashboard=True) is None
    assert options == [{"dashboard_agent_listen_port": 0, "huge_pages": False}]
    assert parts() == usual


def test_serve_s_port_between_replicas_has_the_node_s_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import grpc
    import ray.serve._private.replica as replica

    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    for _ in range(2):
        bind_replica_port("127.0.0.3")
    server = grpc.server(None)
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    server.start()
    try:
        socket.create_connection(("127.0.0.3", port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0)
    finally:
        server.stop(None).wait()


def test_serves_controller_asks_for_nodes_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache

    asked: list[str] = []

    class Nodes:
        def __init__(self, name: str) -> None:
            self.name = name

        def get_all_node_info(self, timeout: float) -> None:
            asked.append(self.name)
            if len(asked) == 1:
                raise TimeoutError

    class Cache(ClusterNodeInfoCache):
        def update(self) -> None:
            self._gcs_client.get_all_node_info(timeout=1.0)

    monkeypatch.setattr("ray.serve._private.cluster_node_info_cache.ClusterNodeInfoCache", Cache)
    now_s = [100.0]
    monkeypatch.setattr("cluster.serve.ray_internals.time.monotonic", lambda: now_s[0])
    look_for_nodes_each(2.0)
    Cache.__abstractmethods__ = frozenset()
    one, other = Cache(Nodes("one")), Cache(Nodes("other"))  # type: ignore[abstract]
    with pytest.raises(TimeoutError):
        one.update()
    for passed_s in (0.0, 0.1, 1.8, 0.2):
        now_s[0] += passed_s
        one.update()
    other.update()
    assert asked == ["one", "one", "one", "other"]


def test_what_workers_print_comes_without_rays_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """In place of Ray's own handler, which `ray.init` has added by then and removes at the end."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
    from ray._private.worker import print_to_stdstream

    printed = {"ip": "10.0.0.1", "pid": 7, "lines": ["one", "two"], "is_err": True}
    taken: list[tuple[object, list[str]]] = []
    dispatcher.add_handler("ray_print_logs", lambda data: print_to_stdstream(data, False))
    try:
        take_worker_lines(lambda *come: taken.append(come))
        dispatcher.emit(printed)
    finally:
        dispatcher.remove_handler("ray_print_logs")
    assert taken == [(("10.0.0.1", 7), ["one", "two"])]
    dispatcher.emit(printed)
    assert (len(taken), capsys.readouterr().err) == (1, "")
