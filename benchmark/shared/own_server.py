"""Serve the application with a benchmark's own workers, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

from cluster.common.settings import Settings
from cluster.serve.app import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, http_front, replica_choice
from cluster.serve.replicas.router_replica import Router
from cluster.serve.start.launch import Build, running_cluster
from router.http.admission import MAX_REQUESTS

OPTIONS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0},
    "health_check_period_s": HEALTH_PERIOD_S,
    "health_check_timeout_s": HEALTH_TIMEOUT_S,
}


def pool(worker: type, name: str, n_workers: int, most: int) -> Any:
    """Return an unbound deployment of workers, each with at most `most` requests at a time."""
    from ray import serve

    deployment: Any = serve.deployment
    options = {"name": name, "num_replicas": n_workers, "max_ongoing_requests": most}
    return deployment(worker, **options, **replica_choice(), **OPTIONS)


def with_router(settings: Settings, build: str, pools: Mapping[Any, Any]) -> Any:
    from ray import serve

    deployment: Any = serve.deployment
    name = next(iter(settings.by_model()))
    front = {"name": "router", "max_ongoing_requests": MAX_REQUESTS, **OPTIONS}
    return deployment(http_front(Router, settings), **front).bind(
        settings, build, {name: pools["encoder"]}, {name: pools["decoder"]}
    )


def serve_until_signal(settings: Settings, build: Build) -> None:
    stop = threading.Event()
    with running_cluster(settings, build=build) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print(f"ready at {cluster.url}", flush=True)
        stop.wait()
