"""Waiting until a deployed application takes requests, telling how far it is.

Every wait here ends at once with `StartCancelled` when the cluster is asked to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx

from cluster.common.errors import ConfigurationError
from cluster.serve.application_state import state_here

Say = Callable[[str], None]

POLL_S = 0.2
SOON_S = 0.1  # once all replicas run
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
        state = state_here(serve.status())
        if state is not None:
            progress.tell(f"workers running: {state.line()}")
            if state.status == "RUNNING":
                return
            if state.status == "DEPLOY_FAILED":
                failed = ", ".join(pool.name for pool in state.pools if not pool.is_ready)
                raise ConfigurationError(
                    f"the cluster did not start: {failed}: {state.reason()}; more in {SERVE_LOGS}"
                )
        stop.wait(POLL_S)
        check_stop(stop)


def wait_for_health(
    url: str,
    timeout_s: float,
    say: Say,
    stop: threading.Event | None = None,
    poll_s: float = POLL_S,
) -> bool:
    """Whether `/health` answers 200 in time; tells the state of the pools as it changes.

    Raises:
        StartCancelled: `stop` was set.
    """
    stop = stop or threading.Event()
    deadline_s = time.monotonic() + timeout_s
    progress = Changes(say)
    while time.monotonic() < deadline_s:
        is_serving, line = health_line(url)
        progress.tell(f"{url}: {line}")
        if is_serving:
            return True
        stop.wait(poll_s)
        check_stop(stop)
    return False


def health_line(url: str) -> tuple[bool, str]:
    """Whether the API takes requests, and the state of each model's pools in words."""
    try:
        answer = httpx.get(f"{url}/health", timeout=10.0)
        pools = answer.json().get("pools", {})
    except (httpx.HTTPError, ValueError):
        return False, "does not answer"
    words = [
        f"{name}: {pool['replicas']} {'ready' if pool['ready'] else 'not ready'}"
        for name, pool in pools.items()
    ]
    return answer.status_code == 200, ", ".join(words) or f"HTTP {answer.status_code}"
