"""What every Serve replica of ours does first, and what Ray tells it about itself.

At its start it checks that its code is the cluster's code, sets up logging, keeps to the cluster's
network and names itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from typing import Any

from cluster.common.logs import configure_logging
from cluster.common.messages import Location
from cluster.common.metrics import MetricSpec, Recorder, serve_recorder
from cluster.common.settings import Settings
from cluster.serve.distribution import CODE_PACKAGES, check_distribution
from cluster.serve.network import keep_to_network

logger = logging.getLogger(__name__)

DOMAIN_LABEL = "nvlink-domain"  # a label of Ray nodes, set by whoever starts them


def start_replica(
    role: str, settings: Settings, build: str, specs: tuple[MetricSpec, ...]
) -> tuple[str, Recorder]:
    """Call first in a replica's constructor.

    Returns:
        The replica's name (role, Serve's id, pid) and its metrics recorder.

    Raises:
        ConfigurationError: this node runs other code than the cluster, or has not its network.
    """
    check_distribution(build)
    name = f"{role}-{_serve_id()}-{os.getpid()}"
    configure_logging(
        settings.log_level,
        CODE_PACKAGES,
        role=role,
        replica=name,
        encoding=settings.log_format,
        quotes=role not in ("router", "batches"),
        stream=sys.__stderr__,
    )
    for package in CODE_PACKAGES:  # Serve's log file too: it is the one that the dashboard shows
        for handler in logging.getLogger("ray.serve").handlers:
            logging.getLogger(package).addHandler(handler)
    keep_to_network(None if role == "router" else settings.kv_network)
    return name, serve_recorder(specs)


def give_memory_back() -> None:
    """Return to the system what loading has freed, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def gpu_share() -> float:
    """The part of its GPU that Ray gave this replica; the whole one where nothing was asked for."""
    import ray

    resources = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    return min(1.0, float(resources.get("GPU", 0.0))) or 1.0


def own_location() -> Location:
    """Where this replica runs; `DOMAIN_LABEL` of its node names its NVLink domain."""
    import ray

    if not ray.is_initialized():
        return Location()
    context = ray.get_runtime_context()
    labels: Any = context.get_node_labels()
    return Location(context.get_node_id(), str(labels.get(DOMAIN_LABEL, "")))


def _serve_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
