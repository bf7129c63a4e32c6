"""The cluster under fault, on four hosts (network namespaces): what one machine cannot lose.

    head      Ray's control store, kept on disk; the proxy that clients talk to; both routers
    encoder   one encoder        decoder   one decoder
    spare     one of each

A userspace relay carries all packets between `encoder` and `decoder`. Deployed by `serve deploy`.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.build import package_root
from cluster.launch import ENVIRONMENT
from tests.chaos.faults import NODE_S, WORKER_S, Fault, FaultBase
from tests.chaos.load import Load
from tests.chaos.network import Link, link_between
from tests.chaos.target import Target
from tests.e2e.conftest import wait_until
from tests.e2e.hosts import NETWORK, Host, hosts

START_S = 180.0
HEAD, PORT = f"{NETWORK}.10", 8000
POOLS = {"encoder": "encoder", "decoder": "decoder", "spare": "spare"}
NOT_RAY = ("sshd", "sleep infinity")


@dataclass
class HostTarget:
    """The hosts of a target, and what is done to them."""

    by_name: dict[str, Host]
    link: Link
    per_node: int | None = 1  # replicas of a role; None: any, as new ones start beside old ones

    def start_ray(self, host: Host) -> None:
        host.run(
            f"ray start --address={HEAD}:6379 --labels=pool={POOLS[host.name]} --num-cpus=1 "
            f"--node-ip-address={host.address} --object-store-memory=100000000",
            timeout_s=120,
        )

    def deploy(self, **settings: Any) -> None:
        """As an operator: `serve deploy`, which returns before anything has happened."""
        head = self.by_name["head"]
        (head.home / "serve.yaml").write_text(yaml.safe_dump(serve_config(settings, self.per_node)))
        head.run("serve deploy serve.yaml --address http://127.0.0.1:8265", timeout_s=90)

    def status(self) -> str:
        said = self.by_name["head"].run("serve status --address http://127.0.0.1:8265", 60)
        application = yaml.safe_load(said.stdout)["applications"].get("splitscribe", {})
        return str(application.get("status"))


def serve_config(settings: dict[str, Any], per_node: int | None) -> dict[str, Any]:
    """`configs/serve/cpu.yaml`, in float32, with two of each role."""
    args: dict[str, Any] = {
        "model": "demo",
        "placement": "split",
        "router": {"replicas": 2, "node_labels": {"pool": "head"}},
        "encoder": {"device": "cpu", "dtype": "float32", "replicas": 2},
        "decoder": {"device": "cpu", "dtype": "float32", "replicas": 2},
    }
    for role in ("encoder", "decoder"):
        args[role]["node_labels"] = {"pool": f"in({role},spare)"}
    for role, changes in settings.items():
        args[role] = {**args[role], **changes} if isinstance(changes, dict) else changes
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": PORT, "keep_alive_timeout_s": 90},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "splitscribe",
                "route_prefix": "/",
                "import_path": "cluster.serve_app:build",
                "args": args,
                "deployments": [
                    {"name": role, "max_replicas_per_node": per_node}
                    for role in ("encoder", "decoder")
                    if per_node
                ],
            }
        ],
    }


@contextmanager
def several_hosts(folder: Path | None = None) -> Iterator[Target]:
    """Four hosts with the application on them; needs root. See `missing_for_hosts`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        with hosts(folder, "head", *POOLS) as made:
            by_name = {host.name: host for host in made}
            with link_between(by_name["encoder"], by_name["decoder"]) as link:
                yield _started(HostTarget(by_name, link))


def _started(ours: HostTarget) -> Target:
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
    head, *others = ours.by_name.values()
    subprocess.run(["ip", "addr", "add", f"{NETWORK}.1/24", "dev", head.bridge], check=True)
    head.run(
        f"ray start --head --node-ip-address={HEAD} --port=6379 --num-cpus=0 --labels=pool=head "
        "--object-store-memory=100000000",
        timeout_s=120,
    )
    for host in others:
        ours.start_ray(host)
    ours.deploy()
    target = Target(
        f"http://{HEAD}:{PORT}",
        lambda: [psutil.Process(host.process.pid) for host in ours.by_name.values()],
        {"router": 2, "encoder": 2, "decoder": 2},
        extras={"hosts": ours},
    )
    wait_until(lambda: not _missing(target), START_S, "a whole cluster")
    return target


def _missing(target: Target) -> str:
    if missing := target.missing():
        raise AssertionError(missing)
    return ""


@dataclass
class BadLink(FaultBase):
    """Packets between the encoder's and the decoder's host are lost, late, or all gone."""

    hold_s: float = 15.0
    limit_s: float = NODE_S
    is_cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0
    _n_before: int = field(default=0, init=False)

    @property
    def name(self) -> str:
        what = "cut" if self.is_cut else ""
        what += f"delayed by {1000 * self.delay_s:g} ms" if self.delay_s else ""
        what += f"losing {self.loss:.0%}" if self.loss else ""
        return f"encoder-decoder link {what} for {self.hold_s:g} s"

    def inject(self, target: Target, load: Load) -> None:
        link: Link = target.extras["hosts"].link
        self._n_before = link.n_packets
        link.is_cut, link.delay_s, link.loss = self.is_cut, self.delay_s, self.loss

    def undo(self, target: Target) -> None:
        link: Link = target.extras["hosts"].link
        link.reset()
        print(f"{link.n_packets - self._n_before} packets met the fault: {self.name}")


@dataclass
class LinkDown(FaultBase):
    """`ip link down` on a host, shorter than it takes to be given up for lost."""

    host: str = "decoder"
    hold_s: float = 4.0
    limit_s: float = NODE_S

    @property
    def name(self) -> str:
        return f"{self.host} host off the network for {self.hold_s:g} s"

    def inject(self, target: Target, load: Load) -> None:
        target.extras["hosts"].by_name[self.host].run("ip link set eth0 down")

    def undo(self, target: Target) -> None:
        target.extras["hosts"].by_name[self.host].run("ip link set eth0 up")


@dataclass
class KillGcs(FaultBase):
    """SIGKILL to Ray's control store; what supervises it starts it again, from its disk."""

    hold_s: float = 5.0
    limit_s: float = NODE_S
    _command: list[str] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"kill the GCS, back after {self.hold_s:g} s"

    def inject(self, target: Target, load: Load) -> None:
        (gcs,) = target.processes("gcs")
        self._command = gcs.cmdline()
        gcs.kill()

    def undo(self, target: Target) -> None:
        head: Host = target.extras["hosts"].by_name["head"]
        head.run(f"nohup {shlex.join(self._command)} > /tmp/gcs.log 2>&1 &")


@dataclass
class LoseHost(FaultBase):
    """As if its power went: silent at once, for the others too. Later it comes back, empty."""

    host: str = "encoder"
    hold_s: float = 30.0
    limit_s: float = NODE_S

    @property
    def name(self) -> str:
        return f"lose the {self.host} host"

    def inject(self, target: Target, load: Load) -> None:
        host: Host = target.extras["hosts"].by_name[self.host]
        host.run("ip link set eth0 down")
        for process in reversed(psutil.Process(host.process.pid).children(recursive=True)):
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                is_first = process.ppid() == host.process.pid
                if not is_first and not any(one in command for one in NOT_RAY):
                    process.kill()

    def undo(self, target: Target) -> None:
        ours: HostTarget = target.extras["hosts"]
        host = ours.by_name[self.host]
        host.run("ip link set eth0 up")
        ours.start_ray(host)


@dataclass
class KillRaylet(FaultBase):
    """SIGKILL to Ray's daemon of a host: all its workers end, and the host says so."""

    host: str = "spare"
    hold_s: float = 20.0
    limit_s: float = NODE_S

    @property
    def name(self) -> str:
        return f"kill the {self.host} host's raylet"

    def inject(self, target: Target, load: Load) -> None:
        host: Host = target.extras["hosts"].by_name[self.host]
        host.run("pkill -9 -x raylet")

    def undo(self, target: Target) -> None:
        ours: HostTarget = target.extras["hosts"]
        ours.by_name[self.host].run("ray stop --force", 60, check=False)
        ours.start_ray(ours.by_name[self.host])


@dataclass
class Redeploy(FaultBase):
    """`serve deploy` of other settings; `good` ones are deployed again where they are broken.

    Serve replaces worker by worker: a replacement has replaced all, or none can be had.
    """

    label: str = "new version"
    settings: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False
    hold_s: float = 0.0
    limit_s: float = WORKER_S

    @property
    def name(self) -> str:
        return f"redeploy: {self.label}"

    def inject(self, target: Target, load: Load) -> None:
        ours: HostTarget = target.extras["hosts"]
        ours.per_node = None
        ours.deploy(**self.settings)
        if self.is_broken:
            return
        time.sleep(2.0)
        wait_until(lambda: ours.status() == "RUNNING", 240, "the new version")

    def undo(self, target: Target) -> None:
        if self.is_broken:
            target.extras["hosts"].deploy()
            time.sleep(2.0)


def host_faults() -> list[Fault]:
    """In the order in which they are run: new versions may put both of a role on one host."""
    return [
        BadLink(delay_s=0.2),
        BadLink(loss=0.05),
        BadLink(is_cut=True),
        LinkDown(),
        KillGcs(),
        LoseHost(host="encoder"),
        LoseHost(host="decoder"),
        KillRaylet(host="spare"),
        Redeploy(settings={"decoder": {"max_batch": 8}, "encoder": {"batch_wait_ms": 4.0}}),
        Redeploy(label="another KV layout", settings={"page_frames": 750}),
        Redeploy(
            label="a model that is not there",
            settings={"model": "/no/such"},
            is_broken=True,
            hold_s=15.0,
        ),
        Redeploy(
            label="workers that cannot start",
            settings={"page_frames": 7},
            is_broken=True,
            hold_s=40.0,
        ),
    ]
