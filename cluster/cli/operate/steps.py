"""What `splitscribe up | deploy | status | down` do, step by step, telling a person how far it is.

Ray's own commands do the work; here is what they leave out: what is waited for, when it is ready,
at which URL, and what to do when a step fails. Each step raises ConfigurationError with a remedy.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cluster.cli.operate.cluster_file import ClusterFile
from cluster.cli.operate.dashboard import Dashboard, Node, head_address
from cluster.cli.operate.serve_file import ServeFile, http_port
from cluster.common.errors import ConfigurationError
from cluster.serve.start.readiness import (
    SERVE_LOGS,
    ApplicationState,
    Changes,
    Say,
    health_line,
    state_of,
)

POLL_S = 1.0
STOP_S = 90.0  # for requests in flight when Serve is stopped
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What runs now. The application is None where nothing is deployed."""

    nodes: tuple[Node, ...]
    application: ApplicationState | None
    url: str | None
    is_serving: bool
    health: str


def pools_line(file: ClusterFile, nodes: Sequence[Node]) -> str:
    """Nodes that are alive, of those that the file asks for: `encoder 1 of 1, decoder 0 of 2`.

    On machines of one's own the file does not say which pool each belongs to, so there is one
    total: `encoder 1, decoder 1, of 3`.
    """
    alive = Counter(node.pool for node in nodes if not node.is_head)
    if file.is_onprem:
        found = ", ".join(f"{pool} {n}" for pool, n in sorted(alive.items())) or "none"
        return f"{found}, of {len(file.worker_addresses)}"
    return ", ".join(f"{pool} {alive[pool]} of {n}" for pool, n in file.least_nodes.items())


def all_there(file: ClusterFile, nodes: Sequence[Node]) -> bool:
    """Whether the cluster has what its file asks for at least."""
    alive = Counter(node.pool for node in nodes if not node.is_head)
    if file.is_onprem:
        return alive.total() >= len(file.worker_addresses)
    return all(alive[pool] >= least for pool, least in file.least_nodes.items())


def wait_for_nodes(file: ClusterFile, dashboard: Dashboard, timeout_s: float, say: Say) -> None:
    """Wait until every pool has its nodes; the head sets them up by itself after `ray up`.

    Raises:
        ConfigurationError: some were missing when the time was over.
    """
    deadline = time.monotonic() + timeout_s
    progress = Changes(say)
    while True:
        nodes = dashboard.nodes()
        line = pools_line(file, nodes)
        progress.tell(f"nodes: {line}")
        if all_there(file, nodes):
            return
        if time.monotonic() > deadline:
            monitor = "tail -n 100 /tmp/ray/session_latest/logs/monitor.out"
            missing = sorted(set(file.worker_addresses) - {node.address for node in nodes})
            who = f" ({', '.join(missing)} missing)" if missing else ""
            raise ConfigurationError(
                f"after {timeout_s:.0f} s the cluster has: {line}{who}. The head sets up the other "
                f"nodes and writes how that goes: ray exec {file.path} {shlex.quote(monitor)}"
            )
        time.sleep(POLL_S)


def deploy(dashboard: Dashboard, file: ServeFile, url: str, timeout_s: float, say: Say) -> None:
    """Send the application, which answers at `url`, and wait until every worker of it runs.

    Raises:
        ConfigurationError: it failed, with the reason of the deployment, or took too long.
    """
    before = state_of(dashboard.serve(), file.application)
    dashboard.deploy(file.content)
    say(f"sent {file.application}: Serve builds it on the cluster")
    deadline = time.monotonic() + timeout_s
    seen: set[str] = set()
    while True:
        state = state_of(dashboard.serve(), file.application)
        if state is not None and (before is None or state.deployed_at != before.deployed_at):
            _tell(state, seen, say)
            if state.is_ready:
                return
            if state.status in FAILED:
                raise ConfigurationError(_failure(state, url))
        if time.monotonic() > deadline:
            waits = f"{state.line()}: {state.reason()}" if state else "nothing is built"
            raise ConfigurationError(
                f"not ready after {timeout_s:.0f} s: {waits}. The cluster's nodes must have "
                f"what is asked for (gpus, node_labels): splitscribe status"
            )
        time.sleep(POLL_S)


def _tell(state: ApplicationState, seen: set[str], say: Say) -> None:
    """Say each line once: how many workers run, and what the others are waiting for."""
    lines = [f"workers running: {state.line()}"] if state.pools else []
    for pool in state.pools:
        if pool.message and not pool.is_ready:
            lines.append(f"{pool.name}: {pool.message.strip().splitlines()[-1]}")
    for line in lines:
        if line not in seen:
            seen.add(line)
            say(line)


def _failure(state: ApplicationState, url: str) -> str:
    is_serving, _ = health_line(url)  # a build that failed leaves what runs as it was
    return (
        f"the deployment failed: {state.reason()}."
        f"{' What was deployed before keeps serving.' if is_serving else ''} "
        f"What to do: change the file and deploy it again; more is in the dashboard under Serve, "
        f"and on the nodes in {SERVE_LOGS}"
    )


def api_url(dashboard: Dashboard, file: ClusterFile | None, port: int) -> str:
    """Where clients reach the API: the head's proxy."""
    host = head_address(file) if file is not None else urlsplit(dashboard.url).hostname
    return f"http://{host}:{port}"


def current_state(dashboard: Dashboard, file: ClusterFile | None) -> ClusterState:
    """What `splitscribe status` shows."""
    nodes = tuple(dashboard.nodes())
    details = dashboard.serve()
    application = state_of(details)
    if application is None:
        return ClusterState(nodes, None, None, False, "nothing is deployed")
    url = api_url(dashboard, file, http_port(details))
    is_serving, health = health_line(url)
    return ClusterState(nodes, application, url, is_serving, health)


def stop_serving(dashboard: Dashboard, say: Say) -> None:
    """End the application and wait until its workers have ended."""
    if not dashboard.serve().get("applications"):
        say("no application is deployed")
        return
    say("stopping the application: workers finish the windows they have")
    dashboard.stop_applications()
    deadline = time.monotonic() + STOP_S
    progress = Changes(say)
    # Serve's own command would also wait a minute for workers that it can no longer start or find.
    while left := dashboard.workers():
        line = ", ".join(f"{name} {n}" for name, n in sorted(left.items()))
        progress.tell(f"workers left: {line}")
        if time.monotonic() > deadline:
            say(f"waited {STOP_S:.0f} s: requests that these workers still have are lost")
            return
        time.sleep(POLL_S)
    say("the application is stopped")
