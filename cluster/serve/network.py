"""Which of a node's networks a replica listens on: the cluster's own, where a host has others too.

A replica listens twice. NIXL does for KV: UCX takes every interface that it finds, unless it is
told which. And Serve does for other replicas, and unpickles what comes: Ray binds that port on
every interface, here it gets the node's own address. SECURITY.md has a table of all ports.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.common.errors import ConfigurationError
from cluster.serve.ray_internals import bind_replica_port

logger = logging.getLogger(__name__)

DEVICES = "UCX_NET_DEVICES"
RDMA = Path("/sys/class/infiniband")

Interfaces = Mapping[str, tuple[str, ...]]  # addresses by interface


def keep_to_network(kv_network: str | None) -> None:
    """Have this replica listen on the cluster's network only. Before NIXL is loaded.

    kv_network: as the setting of that name; None where no KV comes. What UCX_NET_DEVICES says
        already stays.

    Raises:
        ConfigurationError: this node has no such network.
    """
    import ray.util

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    bind_replica_port(address)
    if kv_network is None:
        return
    if DEVICES not in os.environ:
        devices = kv_devices(kv_network, address, interfaces(), rdma_ports())
        if devices is not None:
            os.environ[DEVICES] = devices
    logger.info("KV may take %s; Ray's node is %s", os.environ.get(DEVICES, "any network"), address)


def kv_devices(
    kv_network: str, node_address: str, found: Interfaces, rdma: tuple[str, ...]
) -> str | None:
    """UCX's list of the network devices that KV may take; None leaves the choice to UCX.

    kv_network: "auto": the interface with the node's address, and RDMA if that is not loopback;
        "all"; or names and subnets with commas, as in "mlx5_0:1,10.1.0.0/16".

    Raises:
        ConfigurationError: no interface lies in such a subnet, or there is no such device.
    """
    if kv_network == "all":
        return None
    if kv_network == "auto":
        own = [name for name, addresses in found.items() if node_address in addresses]
        if not own:
            logger.warning("no interface has the node's address %s: KV may take any", node_address)
            return None
        is_alone = ipaddress.ip_address(node_address).is_loopback
        return ",".join((*own[:1], *(() if is_alone else rdma)))
    devices: dict[str, None] = {}  # in the order asked for
    for asked in kv_network.split(","):
        matching = [asked] if asked in (*found, *rdma) else _within(asked, found)
        if not matching:
            there = ", ".join((*found, *rdma))
            raise ConfigurationError(f"kv_network: nothing here is {asked!r}; there are {there}")
        devices |= dict.fromkeys(matching)
    return ",".join(devices)


def _within(subnet: str, found: Interfaces) -> list[str]:
    try:
        network = ipaddress.ip_network(subnet)
    except ValueError:
        return []
    return [
        name
        for name, addresses in found.items()
        if any(ipaddress.ip_address(address) in network for address in addresses)
    ]


def interfaces() -> Interfaces:
    """This machine's, with their IPv4 and IPv6 addresses."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(one.address.partition("%")[0] for one in addresses if one.family in families)
        for name, addresses in psutil.net_if_addrs().items()
    }


def rdma_ports(root: Path = RDMA) -> tuple[str, ...]:
    """Ports of InfiniBand, RoCE and EFA that are up, as UCX names them: `mlx5_0:1`."""
    ports = sorted(state.parent for state in root.glob("*/ports/*/state") if _is_active(state))
    return tuple(f"{port.parent.parent.name}:{port.name}" for port in ports)


def _is_active(state: Path) -> bool:
    return state.read_text().startswith("4:")  # "4: ACTIVE"
