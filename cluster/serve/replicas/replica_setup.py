"""The first steps of every Serve replica: build check, logs, metrics and network.

Serve's port between replicas, which unpickles messages, and NIXL's for KV would listen on every
interface; here they get the node's own. SECURITY.md lists all ports.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from logging.handlers import MemoryHandler
from pathlib import Path

from cluster.common.logs import JsonFormatter, configure_logging
from cluster.common.metrics import MetricSpec, Recorder, serve_recorder
from cluster.common.settings import Settings
from cluster.serve.distribution import CODE_PACKAGES, check_distribution
from cluster.serve.ray_internals import bind_replica_port

logger = logging.getLogger(__name__)

BUSY_OVER_S = 5.0  # interval over which a worker's busy share is measured
DEVICES = "UCX_NET_DEVICES"
RDMA = Path("/sys/class/infiniband")

Interfaces = Mapping[str, tuple[str, ...]]  # addresses by interface


def start_replica(
    role: str, settings: Settings, build: str, specs: tuple[MetricSpec, ...]
) -> tuple[str, Recorder]:
    """Call this first in a replica's constructor. Returns its name and its metrics recorder.

    Raises ConfigurationError: this node has another build.
    """
    from ray import serve

    check_distribution(build)
    name = f"{role}-{serve.get_replica_context().replica_id.unique_id}-{os.getpid()}"
    configure_logging(
        settings.log_level,
        CODE_PACKAGES,
        role=role,
        replica=name,
        encoding=settings.log_format,
        quotes=role not in ("router", "batches"),
        stream=sys.__stderr__,
    )
    # Log to Serve's file too, which the dashboard shows, without the filters in front of it, which
    # add Serve's request id to each line.
    for handler in logging.getLogger("ray.serve").handlers:
        file = handler.target if isinstance(handler, MemoryHandler) else handler
        if file is not None:
            for package in CODE_PACKAGES:
                logging.getLogger(package).addHandler(file)
            if settings.log_format == "json":
                file.setFormatter(JsonFormatter())
    keep_to_network(has_kv=role != "router")
    return name, serve_recorder(specs)


def gpu_share() -> float:
    """Return the share of a GPU that Ray assigned to this replica; 1 if it asked for none."""
    import ray

    resources = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    return min(1.0, float(resources.get("GPU", 0.0))) or 1.0


def own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


class BusyShare:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals: deque[tuple[float, float]] = deque()  # time, total

    def share(self, total_s: float) -> float:
        now_s = self._clock()
        self._totals.append((now_s, total_s))
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= BUSY_OVER_S:
            self._totals.popleft()
        since_s, before_s = self._totals[0]
        return min(1.0, (total_s - before_s) / (now_s - since_s)) if now_s > since_s else 0.0


def keep_to_network(*, has_kv: bool) -> None:
    """Have this replica listen on the cluster's network only. Call it before NIXL is loaded.

    An operator's UCX_NET_DEVICES is kept.
    """
    import ray.util

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    bind_replica_port(address)
    if not has_kv:
        return
    if DEVICES not in os.environ and (devices := kv_devices(address, interfaces(), rdma_ports())):
        os.environ[DEVICES] = devices
    logger.info("KV may take %s; Ray's node is %s", os.environ.get(DEVICES, "any network"), address)


def kv_devices(node_address: str, found: Interfaces, rdma: tuple[str, ...]) -> str:
    """Return UCX's device list: the node's interface, and RDMA unless it is loopback.

    An empty one leaves the choice to UCX.
    """
    own = [name for name, addresses in found.items() if node_address in addresses]
    if not own:
        logger.warning("no interface has the node's address %s: KV may take any", node_address)
        return ""
    is_alone = ipaddress.ip_address(node_address).is_loopback
    return ",".join((*own[:1], *(() if is_alone else rdma)))


def interfaces() -> Interfaces:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(one.address.partition("%")[0] for one in addresses if one.family in families)
        for name, addresses in psutil.net_if_addrs().items()
    }


def rdma_ports(root: Path = RDMA) -> tuple[str, ...]:
    """Return the active ports of InfiniBand, RoCE and EFA in UCX's notation, such as `mlx5_0:1`."""
    states = sorted(root.glob("*/ports/*/state"))
    ports = [one.parent for one in states if one.read_text().startswith("4:")]  # "4: ACTIVE"
    return tuple(f"{port.parent.parent.name}:{port.name}" for port in ports)
