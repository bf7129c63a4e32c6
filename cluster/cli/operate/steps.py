"""The steps of `splitscribe up`, `deploy`, `status` and `down` around those of Ray's commands.

Each failure is a ConfigurationError with a remedy.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from cluster.cli.operate.dashboard import Dashboard, Node, head_address, ray_command
from cluster.cli.operate.files import ClusterFile, ServeFile
from cluster.common.errors import ConfigurationError
from cluster.serve.start.readiness import SERVE_LOGS, Changes, Say, health_line, state_of

POLL_S = 1.0
STOP_S = 90.0  # for requests in flight when Serve is stopped
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
DOWN_S = 900.0  # clouds take minutes to end machines
STDERR = 2  # the launcher prints there, not among the results on standard output
RAY_STOP_S = 60.0  # on one machine
SSH_AT_ONCE = 16


def pools_line(file: ClusterFile, nodes: Sequence[Node]) -> str:
    """`encoder 1 of 1, decoder 0 of 2`; where the file has no pools, `encoder 1, of 3`."""
    alive = Counter(node.pool for node in nodes if not node.is_head)
    if file.is_onprem:
        found = ", ".join(f"{pool} {n}" for pool, n in sorted(alive.items())) or "none"
        return f"{found}, of {len(file.worker_addresses)}"
    return ", ".join(f"{pool} {alive[pool]} of {n}" for pool, n in file.least_nodes.items())


def all_there(file: ClusterFile, nodes: Sequence[Node]) -> bool:
    alive = Counter(node.pool for node in nodes if not node.is_head)
    if file.is_onprem:
        return alive.total() >= len(file.worker_addresses)
    return all(alive[pool] >= least for pool, least in file.least_nodes.items())


def wait_for_nodes(file: ClusterFile, dashboard: Dashboard, timeout_s: float, say: Say) -> None:
    """Wait until every pool has its nodes, which the head starts after `ray up`."""
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
    """Send the application and wait until all its workers run. url: of its API."""
    before = state_of(dashboard.serve())
    dashboard.deploy(file.content)
    say("sent the application: Serve builds it on the cluster")
    deadline = time.monotonic() + timeout_s
    progress = Changes(say)
    while True:
        state = state_of(dashboard.serve())
        if state is not None and (before is None or state.deployed_at != before.deployed_at):
            progress.tell(*state.lines())
            if state.is_ready:
                return
            if state.status in FAILED:
                is_serving, _ = health_line(url)  # a failed build leaves the old version running
                keeps = " What was deployed before keeps serving." if is_serving else ""
                raise ConfigurationError(
                    f"the deployment failed: {state.reason()}.{keeps} What to do: change the file "
                    f"and deploy it again; more is in the dashboard under Serve, and on the nodes "
                    f"in {SERVE_LOGS}"
                )
        if time.monotonic() > deadline:
            waits = f"{state.line()}: {state.reason()}" if state else "nothing is built"
            raise ConfigurationError(
                f"not ready after {timeout_s:.0f} s: {waits}. The cluster's nodes must have "
                f"what is asked for (gpus, node_labels): splitscribe status"
            )
        time.sleep(POLL_S)


def api_url(dashboard: Dashboard, file: ClusterFile | None, port: int) -> str:
    host = head_address(file) if file is not None else urlsplit(dashboard.url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def stop_serving(dashboard: Dashboard, say: Say) -> None:
    """Stop the application and wait until its workers have ended, or for STOP_S."""
    if not dashboard.serve().get("applications"):
        say("no application is deployed")
        return
    say("stopping the application: workers finish the windows they have")
    dashboard.deploy({"applications": []})
    deadline = time.monotonic() + STOP_S
    progress = Changes(say)
    # `serve shutdown` would also wait a minute for workers that it cannot start or find.
    while left := dashboard.workers():
        line = ", ".join(f"{name} {n}" for name, n in sorted(left.items()))
        progress.tell(f"workers left: {line}")
        if time.monotonic() > deadline:
            say(f"waited {STOP_S:.0f} s: requests that these workers still have are lost")
            return
        time.sleep(POLL_S)
    say("the application is stopped")


def run_ray_up(file: ClusterFile) -> None:
    if _launcher("up", file) != 0:
        again = shlex.join(["ray", "up", "-vvv", str(file.path)])
        # `ray up` copies the file to the head before it runs the file's commands, and the
        # autoscaler there reads the copy.
        raise ConfigurationError(
            f"`ray up` failed; its last lines say why, and this prints more of them: {again}. "
            f"Correct the file and run this again soon if the cluster was up: its head may already "
            f"set up the other nodes with the file, and where that fails, Ray ends there"
        )


def run_ray_down(file: ClusterFile, say: Say) -> None:
    """On machines of one's own `ray down` stops only the head, so stop Ray on each of them."""
    problems = []
    try:
        if _launcher("down", file, DOWN_S) != 0:
            problems.append("`ray down` failed; its last lines say why")
    except subprocess.TimeoutExpired:
        problems.append(f"`ray down` was ended because it still ran after {DOWN_S:.0f} s")
    if file.is_onprem:
        if left := _stop_machines(file, say):
            problems.append(
                f"Ray may still run on {', '.join(left)}, where ssh or `ray stop` failed; "
                f"there: ray stop --force"
            )
    elif problems:
        problems.append("look in the cloud's console for machines that still run and cost money")
    if problems:
        raise ConfigurationError(
            f"{'. '.join(problems)}. Then try again: splitscribe down {file.path}"
        )


def _stop_machines(file: ClusterFile, say: Say) -> list[str]:
    """Stop Ray on the head first, so that it starts no workers. Return addresses that failed."""
    script = "bash --login -c -i '. ~/.bashrc; ray stop --force' > /dev/null 2>&1 < /dev/null"
    failed: list[str] = []

    def stop(address: str) -> None:
        started = time.monotonic()
        try:
            subprocess.run(
                [*file.ssh(address), script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=RAY_STOP_S,
                check=True,
            )
            say(f"{address}: Ray stopped, in {time.monotonic() - started:.1f} s")
        except subprocess.SubprocessError:
            failed.append(address)

    for machines in ([file.head_address] if file.head_address else [], file.worker_addresses):
        with ThreadPoolExecutor(SSH_AT_ONCE) as pool:
            list(pool.map(stop, machines))
    return sorted(failed)


def _launcher(name: str, file: ClusterFile, limit_s: float | None = None) -> int:
    """Raises subprocess.TimeoutExpired: `ray NAME` ran longer than `limit_s` and was killed."""
    return subprocess.run(
        ray_command(name, "--yes", "--log-style=pretty", str(file.path)),
        env=file.environment(),
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        timeout=limit_s,
        check=False,
    ).returncode
