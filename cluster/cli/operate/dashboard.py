"""A client of Ray's dashboard over HTTP, through ssh where it listens on the head's loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.operate.files import OTHER_NODES, ClusterFile, read_token
from cluster.common.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx

PORT = 8265
REPLICA = "ServeReplica:"  # begins a replica's class name; its application and deployment follow
APPLICATIONS = "/api/serve/applications/"
TUNNEL_S = 20.0  # for ssh to connect
LISTEN_S = 5.0  # then, for a dashboard that is starting
MOST_SHOWN = 2000  # the last characters of a response, where a traceback has its reason


@dataclass(frozen=True, slots=True)
class Node:
    address: str
    pool: str
    is_head: bool


class Dashboard:
    """Every call raises ConfigurationError with a remedy where the dashboard does not answer."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self.url = client, str(client.base_url).rstrip("/")

    def nodes(self) -> list[Node]:
        found = self._call("GET", "/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
        return [
            Node(
                one["node_ip"],
                "head" if one["is_head_node"] else one["labels"].get("pool", OTHER_NODES),
                one["is_head_node"],
            )
            for one in found
            if one["state"] == "ALIVE"
        ]

    def workers(self) -> Counter[str]:
        alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        answer = self._call("GET", f"/api/v0/actors?limit=10000&{alive}")
        classes = (one["class_name"] for one in answer["data"]["result"]["result"])
        return Counter(name.split(":")[-1] for name in classes if name.startswith(REPLICA))

    def serve(self) -> dict[str, Any]:
        return self._call("GET", APPLICATIONS)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Have Serve run these applications and no others; return before it has done so."""
        self._call("PUT", APPLICATIONS, json=config)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        import httpx

        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ConfigurationError(
                f"Ray's dashboard does not answer at {self.url}: {why}; "
                f"is the cluster up? Name it by --cluster FILE or --address URL"
            ) from error
        if answer.status_code in (401, 403):
            raise ConfigurationError(
                f"{self.url} refuses the token of this machine: copy the cluster's token "
                f"to ~/.ray/auth_token (on the head: ray get-auth-token)"
            )
        is_object = answer.content[:1] == b"{"
        if not answer.is_success or (method == "GET" and not is_object):
            raise ConfigurationError(
                f"{self.url} answered {answer.status_code}: {answer.text[-MOST_SHOWN:]}; is that "
                f"Ray's dashboard? Name it by --cluster FILE or --address URL"
            )
        content: dict[str, Any] = answer.json() if is_object else {}
        return content


def ray_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("ray")), *arguments]


def head_address(file: ClusterFile) -> str:
    """Raises ConfigurationError: Ray's launcher finds no head of this cluster."""
    if file.head_address is not None:
        return file.head_address
    run = subprocess.run(
        ray_command("get-head-ip", str(file.path)),
        env=file.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.split()
    if run.returncode or not lines:
        why = run.stderr.strip()[-500:]
        raise ConfigurationError(f"the cluster of {file.path} has no head; is it up? {why}")
    return lines[-1]


@contextlib.contextmanager
def reach(file: ClusterFile | None, address: str | None) -> Iterator[Dashboard]:
    """Connect to the dashboard at `address`, or by ssh to that of the head in `file`."""
    import httpx  # late, because its import is slow

    with contextlib.ExitStack() as stack:
        if address is None and file is not None:
            address = stack.enter_context(_tunnel(file))
        url = address or os.environ.get("RAY_DASHBOARD_ADDRESS") or f"http://127.0.0.1:{PORT}"
        headers = {"Authorization": f"Bearer {token}"} if (token := read_token()) else {}
        # A proxy of the environment must not be asked for the local end of a tunnel.
        is_here = url.startswith("http://127.0.0.1:")
        try:
            client = httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=not is_here)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"{url} is not the URL of a dashboard: {error}") from error
        yield Dashboard(stack.enter_context(client))


@contextlib.contextmanager
def _tunnel(file: ClusterFile) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        _forwarding(file, port),
        env=file.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, file)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _forwarding(file: ClusterFile, port: int) -> list[str]:
    """By ssh where possible: `ray dashboard` refuses a head whose last `ray up` failed."""
    if file.is_onprem and file.head_address is not None:
        forward = ("-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{port}:127.0.0.1:{PORT}")
        return [*file.ssh(file.head_address), *forward]
    port_flags = ("--port", str(port), "--remote-port", str(PORT))
    return ray_command("dashboard", str(file.path), *port_flags)


def _wait_for(url: str, process: subprocess.Popen[bytes], file: ClusterFile) -> None:
    import httpx

    deadline = time.monotonic() + TUNNEL_S
    is_there = False
    while True:
        try:
            answer = httpx.get(f"{url}/api/version", timeout=5.0, trust_env=False)
            if not answer.is_server_error:
                return
            is_connected = True
        except httpx.HTTPError as error:  # ssh accepts even if nothing listens there
            is_connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if is_connected and not is_there:
            is_there, deadline = True, time.monotonic() + LISTEN_S
        if process.poll() is not None or time.monotonic() > deadline:
            what = "ssh connects, but nothing answers" if is_there else "ssh does not connect"
            raise ConfigurationError(
                f"the head's dashboard cannot be reached: {what}; is the cluster up? "
                f"See why: ray dashboard {file.path}"
            )
        time.sleep(0.2)
