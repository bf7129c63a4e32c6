"""The state of a deployed application, and the wait until it is ready.

Every wait raises `StartCancelled` at once when its stop event is set.
"""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.serve.ray_environment import APP_NAME

Say = Callable[[str], None]

POLL_S = 0.2
SOON_S = 0.1  # the same, once all replicas run
CONNECT_S = 2.0
LOOK_S = 0.5  # interval of checks whether the cluster still exists
GONE_S, AWAY_S = 1.0, 30.0
SERVE_LOGS = "/tmp/ray/session_latest/logs/serve"


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    running: int
    wanted: int
    status: str
    message: str

    @property
    def is_ready(self) -> bool:
        return self.status == "HEALTHY" and self.running >= self.wanted

    @property
    def waits_for(self) -> str:
        """The last line of its message; empty if it is ready or only takes long to initialize."""
        is_plain = self.is_ready or "to initialize" in self.message
        return "" if is_plain else "".join(self.message.strip().splitlines()[-1:])


@dataclass(frozen=True, slots=True)
class ApplicationState:
    status: str
    message: str
    pools: tuple[Pool, ...]
    deployed_at: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.status == "RUNNING" and all(pool.is_ready for pool in self.pools)

    def line(self) -> str:
        """Such as `router 1/1, encoder 0/2, decoder 2/2`."""
        return ", ".join(f"{pool.name} {pool.running}/{pool.wanted}" for pool in self.pools)

    def lines(self) -> list[str]:
        if not any(pool.wanted for pool in self.pools):
            return []
        waits = [f"{pool.name}: {pool.waits_for}" for pool in self.pools if pool.waits_for]
        return [f"workers running: {self.line()}", *waits]

    def reason(self) -> str:
        texts = [pool.message for pool in self.pools if not pool.is_ready and pool.message]
        for text in (*texts, self.message):
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return re.sub(r"^[\w.]+Error: ", "", lines[-1])  # the exception's own message
        return self.status


def state_of(details: Mapping[str, Any]) -> ApplicationState | None:
    """Read the response of Ray's dashboard about Serve; None: there is no such application."""
    found = details.get("applications", {}).get(APP_NAME)
    if found is None:
        return None
    pools = [
        Pool(
            name=name,
            running=sum(one["state"] == "RUNNING" for one in deployment["replicas"]),
            wanted=deployment["target_num_replicas"],
            status=deployment["status"],
            message=deployment.get("message", ""),
        )
        for name, deployment in found["deployments"].items()
    ]
    return ApplicationState(
        found["status"],
        found.get("message", ""),
        _in_order(pools),
        float(found.get("last_deployed_time_s") or 0.0),
    )


def state_here(status: Any) -> ApplicationState | None:
    """Read the result of `serve.status()`; None: there is no such application."""
    found = status.applications.get(APP_NAME)
    if found is None:
        return None
    pools = []
    for name, deployment in found.deployments.items():
        states = deployment.replica_states
        running, wanted = states.get("RUNNING", 0), sum(states.values())
        pools.append(Pool(name, running, wanted, deployment.status.value, deployment.message))
    return ApplicationState(found.status.value, found.message, _in_order(pools))


def _in_order(pools: Iterable[Pool]) -> tuple[Pool, ...]:
    return tuple(
        sorted(
            pools,
            key=lambda pool: (pool.name != "router", pool.name.startswith("decoder"), pool.name),
        )
    )


class Changes:
    def __init__(self, say: Say) -> None:
        self._say = say
        self.last: tuple[str, ...] = ()

    def tell(self, *lines: str) -> None:
        for line in lines:
            if line not in self.last:
                self._say(line)
        self.last = lines


class StartCancelled(Exception):  # noqa: N818 - no error, it was requested
    pass


class StopRequest(threading.Event):
    """leave: set while no clients are served; after calling it the process may exit at once."""

    leave: Callable[[], object] | None = None


def check_ray_answers(address: str) -> None:
    """Raises ConfigurationError at once, where Ray itself would retry for a minute."""
    where = address.removeprefix("ray://")
    # Other addresses, such as "auto", Ray resolves on this machine.
    if where.rpartition(":")[2].isdigit() and not answers(where):
        raise ConfigurationError(f"no Ray cluster answers at {address}")


def answers(address: str) -> bool:
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError):  # a port of six digits, no host's name
        return False
    return True


def has_ended(head: str, raylet: int, over: threading.Event) -> bool:
    """Wait until a Ray cluster has ended; False: `over` was set before.

    head: HOST:PORT, which may be unreachable for `AWAY_S`. raylet: a descriptor from `pidfd_open`.
    """
    answered_s = time.monotonic()
    while not over.wait(LOOK_S):
        is_here = not select.select([raylet], [], [], 0)[0]
        if is_here and answers(head):
            answered_s = time.monotonic()
        elif time.monotonic() - answered_s >= (AWAY_S if is_here else GONE_S):
            return not over.is_set()
    return False


def check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise StartCancelled


def wait_for_replicas(say: Say, stop: threading.Event) -> None:
    """Raises ConfigurationError: a deployment failed."""
    from ray import serve

    progress = Changes(say)
    while True:
        state = state_here(serve.status())
        if state is not None:
            progress.tell(*state.lines())
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
    """Wait until `/health` is 200, reporting changes of the pools to `say`. False: timed out."""
    stop = stop or threading.Event()
    deadline_s = time.monotonic() + timeout_s
    progress = Changes(say)
    while time.monotonic() < deadline_s:
        is_serving, line = health_line(url)
        if is_serving:
            return True
        progress.tell(f"{url}: {line}")
        stop.wait(poll_s)
        check_stop(stop)
    return False


def health_line(url: str) -> tuple[bool, str]:
    import httpx

    try:
        # Loading certificates would take 50 ms of a core. The environment's proxy is for other
        # networks.
        is_tls = url.startswith("https:")
        answer = httpx.get(f"{url}/health", timeout=10.0, verify=is_tls, trust_env=False)
        content = answer.json()
    except (httpx.HTTPError, ValueError):
        return False, "does not answer"
    if not isinstance(content, dict) or "pools" not in content:  # another server has the port
        return False, f"HTTP {answer.status_code}"
    words = [
        f"{name}: {pool['replicas']} {'ready' if pool['ready'] else 'not ready'}"
        for name, pool in content["pools"].items()
    ]
    return answer.status_code == 200, ", ".join(words) or f"HTTP {answer.status_code}"
