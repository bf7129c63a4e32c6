"""What every Serve replica of ours does at its start and while it lives.

Checks that its code is the cluster's code, sets up logging, names itself, and tells an
engine's statistics to the metrics once a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from cluster.build import check_distribution
from cluster.logs import PACKAGES, configure_logging
from cluster.metrics import MetricSpec, Recorder, serve_recorder
from cluster.settings import Settings

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0


def start_replica(
    role: str, settings: Settings, build: str, specs: tuple[MetricSpec, ...]
) -> tuple[str, Recorder]:
    """Call first in a replica's constructor.

    Returns:
        The replica's name (role, Serve's id, pid) and its metrics recorder.

    Raises:
        ConfigurationError: this node runs other code than the cluster.
    """
    check_distribution(build)
    name = f"{role}-{_serve_id()}-{os.getpid()}"
    configure_logging(
        settings.log_level,
        role=role,
        replica=name,
        encoding=settings.log_format,
        quotes=role != "router",
        stream=sys.__stderr__,
    )
    for package in PACKAGES:  # Serve's log file too: it is the one that the dashboard shows
        for handler in logging.getLogger("ray.serve").handlers:
            logging.getLogger(package).addHandler(handler)
    return name, serve_recorder(specs)


async def report_each_second(record: Callable[[], None]) -> None:
    """Have `record` tell its state until cancelled; should it fail, that is logged, not fatal."""
    while True:
        try:
            record()
        except Exception:
            logger.exception("reading the state for the metrics failed")
        await asyncio.sleep(REPORT_PERIOD_S)


def gpu_share() -> float:
    """The part of its GPU that Ray gave this replica; the whole one where nothing was asked for."""
    import ray

    resources = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    return min(1.0, float(resources.get("GPU", 0.0))) or 1.0


def _serve_id() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
