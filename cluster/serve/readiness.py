"""Waiting until a deployed application takes requests, telling how far it is.

Every wait here ends at once with `StartCancelled` when the cluster is asked to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from cluster.errors import ConfigurationError
from cluster.serve.ray_environment import APP_NAME

Say = Callable[[str], None]

POLL_S = 0.2
SERVE_LOGS = "/tmp/ray/session_latest/logs/serve"


class Changes:
    """Says a line where it is not the same as the last one."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.last = ""

    def tell(self, line: str) -> None:
        if line != self.last:
            self._say(line)
            self.last = line


class StartCancelled(Exception):  # noqa: N818 - what was asked for is no error
    """The cluster was asked to stop while it was starting."""


def check_stop(stop: threading.Event) -> None:
    """Raises StartCancelled: `stop` is set."""
    if stop.is_set():
        raise StartCancelled


def wait_for_replicas(say: Say, stop: threading.Event) -> None:
    """Until every replica of the application runs; tells how many do, whenever that changes.

    Raises:
        ConfigurationError: a deployment failed; has its reason.
        StartCancelled: `stop` was set.
    """
    from ray import serve

    progress = Changes(say)
    while True:
        application = serve.status().applications.get(APP_NAME)
        progress.tell(_replicas_line(application.deployments if application else {}))
        if application is not None and application.status == "RUNNING":
            return
        if application is not None and application.status == "DEPLOY_FAILED":
            raise ConfigurationError(
                f"the cluster did not start: {_reason(application)}; more in {SERVE_LOGS}"
            )
        stop.wait(POLL_S)
        check_stop(stop)


def _replicas_line(deployments: Any) -> str:
    parts = []
    for name, deployment in deployments.items():
        states = {str(state): n for state, n in deployment.replica_states.items()}
        running = sum(n for state, n in states.items() if state.endswith("RUNNING"))
        parts.append(f"{name} {running}/{sum(states.values())}")
    return f"workers running: {', '.join(parts)}" if parts else ""


def _reason(application: Any) -> str:
    """The last line of what the first deployment that failed says of itself."""
    for name, deployment in application.deployments.items():
        if deployment.status != "HEALTHY" and deployment.message:
            return f"{name}: {deployment.message.strip().splitlines()[-1]}"
    return str(application.message)


def wait_for_health(url: str, timeout_s: float, say: Say, stop: threading.Event) -> None:
    """Until `/health` answers 200; tells the state of the pools, whenever that changes.

    Raises:
        ConfigurationError: it did not in time.
        StartCancelled: `stop` was set.
    """
    deadline_s = time.monotonic() + timeout_s
    progress = Changes(say)
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(f"{url}/health", timeout=5.0)
            if answer.status_code == 200:
                return
            progress.tell(_pools_line(answer))
        except httpx.HTTPError:
            progress.tell("router: starting")
        stop.wait(POLL_S)
        check_stop(stop)
    raise ConfigurationError(
        f"the pools were not ready after {timeout_s:.0f} s ({progress.last}); "
        f"look at the replicas' logs under {SERVE_LOGS}"
    )


def _pools_line(answer: httpx.Response) -> str:
    try:
        pools = answer.json()["pools"]
    except (ValueError, KeyError, TypeError):
        return "router: starting"
    return ", ".join(
        f"{role}: {'ready' if pool.get('ready') else 'starting'}" for role, pool in pools.items()
    )
