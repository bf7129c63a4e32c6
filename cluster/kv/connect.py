"""Choosing a transport, and making its two ends. The roles and `cluster.serve.app` start here.

"auto" is NIXL where it loads (Linux), else the same-process transport. NIXL is imported only when
it is chosen, so that a machine without it can still run in one process.
"""

from __future__ import annotations

from typing import Literal

from cluster.errors import ConfigurationError
from cluster.kv.layout import PageLayout
from cluster.kv.memory import MemoryExporter, MemoryImporter
from cluster.kv.nixl_agent import load_api
from cluster.kv.transfer import LEASE_S, RENEW_S, KVExporter, KVImporter

TransportName = Literal["auto", "nixl", "memory"]


def available_transport() -> Literal["nixl", "memory"]:
    """The best transport that works on this machine."""
    try:
        load_api()
    except ConfigurationError:
        return "memory"
    return "nixl"


def make_exporter(
    transport: TransportName,
    layout: PageLayout,
    n_pages: int,
    *,
    cluster_key: bytes,
    name: str = "encoder",
    device: str = "cpu",
    lease_s: float = LEASE_S,
) -> KVExporter:
    """An exporter with a pool of `n_pages`; `name` is role and replica, as in "encoder-0".

    Raises:
        ConfigurationError: the transport does not work on this machine.
    """
    if _resolve(transport) == "memory":
        return MemoryExporter(
            layout, n_pages, cluster_key=cluster_key, name=name, device=device, lease_s=lease_s
        )
    from cluster.kv.nixl import NixlExporter

    return NixlExporter(
        layout, n_pages, cluster_key=cluster_key, name=name, device=device, lease_s=lease_s
    )


def make_importer(
    transport: TransportName,
    layout: PageLayout,
    n_pages: int,
    *,
    cluster_key: bytes,
    name: str = "decoder",
    device: str = "cpu",
    fetch_timeout_s: float = 10.0,
    renew_s: float = RENEW_S,
) -> KVImporter:
    """An importer with a pool of `n_pages`.

    Raises:
        ConfigurationError: the transport does not work on this machine.
    """
    if _resolve(transport) == "memory":
        return MemoryImporter(
            layout,
            n_pages,
            cluster_key=cluster_key,
            name=name,
            device=device,
            fetch_timeout_s=fetch_timeout_s,
            renew_s=renew_s,
        )
    from cluster.kv.nixl import NixlImporter

    return NixlImporter(
        layout,
        n_pages,
        cluster_key=cluster_key,
        name=name,
        device=device,
        fetch_timeout_s=fetch_timeout_s,
        renew_s=renew_s,
    )


def _resolve(transport: TransportName) -> Literal["nixl", "memory"]:
    return available_transport() if transport == "auto" else transport
