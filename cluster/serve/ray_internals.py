"""All uses of Ray's private names, which may change in any version of Ray.

`tests/unit/serve/test_ray_internals.py` checks each of them. Ray is imported by the functions.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

# "1": Ray's native library in this process does not handle signals. By default it handles SIGTERM
# by printing all threads' stacks, and ends the process.
KEEP_SIGNALS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
# "0": Ray runs on one machine, at the loopback address. This is the default on a Mac.
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ANY_ADDRESS = "[::]:"
# The parts of Ray's dashboard for `ray_dashboard: serve`: nodes, actors, logs and Serve. Each is a
# process of 20 MB; the others show jobs, events, Grafana, Data and Train.
DASHBOARD_PARTS = ("NodeHead", "ServeHead", "StateHead")

AddPort = Callable[[Any, str], int]


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Have Ray start at the loopback address, unless the operator has set `ONE_MACHINE`."""
    if ONE_MACHINE in os.environ:
        yield
        return
    os.environ[ONE_MACHINE] = "0"  # for the processes that Ray starts
    from ray._private import ray_constants

    usual = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray may have read the variable before
    try:
        yield
    finally:
        del os.environ[ONE_MACHINE]
        ray_constants.ENABLE_RAY_CLUSTER = usual


@contextmanager
def small_ray_head(parts: Sequence[str] = ()) -> Iterator[None]:
    """Have Ray start with only these parts of its dashboard, and without its autoscaler (50 MB).

    `ray.init` starts a dashboard even without `include_dashboard`, and waits 3 s for it. Ray's
    agent gets any free port, as it would try for 3 s to get its default port beside another Ray.
    """
    from ray._private import node, ray_constants, services

    head: Any = node.Node
    usual_start, usual_monitor = services.start_ray_process, head.start_monitor
    usual_dashboard, usual_raylet = head.start_api_server, services.start_raylet

    def start(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
            command = [*command, f"--modules-to-load={','.join(parts)}"]
        return usual_start(command, process_type, *args, **options)

    def start_raylet(*args: Any, **options: Any) -> Any:
        return usual_raylet(*args, **(options | {"dashboard_agent_listen_port": 0}))

    services.start_ray_process, services.start_raylet = start, start_raylet
    head.start_monitor = lambda node: None
    if not parts:
        head.start_api_server = lambda node, **options: None
    try:
        yield
    finally:
        services.start_ray_process, head.start_monitor = usual_start, usual_monitor
        head.start_api_server, services.start_raylet = usual_dashboard, usual_raylet


def look_for_nodes_each(seconds: float) -> None:
    """Limit how often Serve's controller lists nodes, by default three times in each loop."""
    from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache

    cache: Any = ClusterNodeInfoCache
    usual = cache.update
    asked_s = WeakKeyDictionary[Any, float]()

    def update(self: Any) -> None:
        now_s = time.monotonic()
        if now_s - asked_s.get(self, -math.inf) >= seconds:
            usual(self)
            asked_s[self] = now_s

    cache.update = update


def bind_replica_port(address: str) -> None:
    """Have Serve bind this replica's gRPC port to `address` instead of every interface."""
    from ray.serve._private import replica

    add: AddPort | None = getattr(replica, "add_port_to_grpc_server", None)
    if add is None:
        logger.warning("this Ray binds the port between replicas on every interface")
    elif not isinstance(add, partial):
        replica.add_port_to_grpc_server = partial(  # type: ignore[attr-defined]
            _add_port, add, address
        )


def _add_port(add: AddPort, node_address: str, server: Any, address: str) -> int:
    if address.startswith(ANY_ADDRESS):
        host = f"[{node_address}]" if ":" in node_address else node_address
        address = f"{host}:{address.removeprefix(ANY_ADDRESS)}"
    return add(server, address)


def prepared_cluster_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Complete and check a cluster file's content as `ray up` does.

    Raises jsonschema's ValidationError, or one of many other errors.
    """
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(copy.deepcopy(dict(content)))
    validate_config(prepared)
    return prepared


def ray_addresses_here() -> set[str]:
    """Return HOST:PORT of the control store of each Ray cluster that has a node on this machine.

    `ray.init(address="auto")` would take any of them.
    """
    import psutil

    flag = "--gcs-address="
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            found |= {
                arg.removeprefix(flag)
                for arg in process.info["cmdline"] or ()
                if arg.startswith(flag)
            }
    return found


def shared_value(namespace: bytes, name: bytes, first: bytes) -> bytes:
    """Return the value that the Ray cluster keeps under `name`: the `first` of the first caller."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    _internal_kv_put(name, first, False, namespace=namespace)
    kept: bytes = _internal_kv_get(name, namespace=namespace)
    return kept


def replica_is_stopping() -> bool:
    """Whether Serve is stopping this process's replica. Serve tells it only after all requests."""
    from ray._private.worker import global_worker

    return any(
        getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False)
        for actor in global_worker.actors.values()
    )


def take_worker_lines(take: Callable[[object, list[str]], None]) -> None:
    """Give `take` the lines that workers print; no setting omits Ray's coloured prefix."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    name = "ray_print_logs"  # of Ray's own handler; Ray removes the handler of this name at the end
    dispatcher.remove_handler(name)
    dispatcher.add_handler(name, lambda data: take((data["ip"], data["pid"]), data["lines"]))


def raylet_pid() -> int:
    from ray._private.worker import global_worker

    node: Any = global_worker.node
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.raylet_socket_name)
        listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(listener[:4], sys.byteorder)


def kill_own_ray() -> None:
    from ray._private import worker

    with suppress(Exception):
        if worker._global_node is not None:
            worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)
