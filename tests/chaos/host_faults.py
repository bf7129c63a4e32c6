"""Faults of whole hosts, of the network between them, and of new versions."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.chaos.faults import NODE_S, WORKER_S, Fault
from tests.chaos.load import Load
from tests.chaos.network import Link
from tests.chaos.several_hosts import HostTarget
from tests.chaos.target import MARKS, Target
from tests.support.hosts import Host

NOT_RAY = ("sshd", "sleep infinity")


def cluster_of(target: Target) -> HostTarget:
    assert isinstance(target.hosts, HostTarget)
    return target.hosts


@dataclass
class BadLink(Fault):
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
        link: Link = cluster_of(target).link
        self._n_before = link.n_packets
        link.is_cut, link.delay_s, link.loss = self.is_cut, self.delay_s, self.loss

    def undo(self, target: Target) -> None:
        link: Link = cluster_of(target).link
        link.reset()
        print(f"{link.n_packets - self._n_before} packets met the fault: {self.name}")


@dataclass
class HostFault(Fault):
    host: str = "spare"
    hold_s: float = 30.0
    limit_s: float = NODE_S

    def there(self, target: Target) -> Host:
        return cluster_of(target).by_name[self.host]

    def processes(self, target: Target) -> list[psutil.Process]:
        first = psutil.Process(self.there(target).process.pid)
        return [one for one in first.children(recursive=True) if one.ppid() != first.pid]


@dataclass
class LinkDown(HostFault):
    title = "{host} host off the network for {hold_s:g} s"
    hold_s: float = 4.0

    def inject(self, target: Target, load: Load) -> None:
        self.there(target).run("ip link set eth0 down")

    def undo(self, target: Target) -> None:
        self.there(target).run("ip link set eth0 up")


@dataclass
class LoseHost(HostFault):
    """As if its power went: silent at once, for the others too. Later it comes back, empty."""

    title = "lose the {host} host"

    def inject(self, target: Target, load: Load) -> None:
        self.there(target).run("ip link set eth0 down")
        for process in reversed(self.processes(target)):
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if not any(one in command for one in NOT_RAY):
                    process.kill()

    def undo(self, target: Target) -> None:
        self.there(target).run("ip link set eth0 up")
        cluster_of(target).start_ray(self.there(target))


@dataclass
class KillRaylet(HostFault):
    title = "kill the {host} host's raylet"
    hold_s: float = 20.0

    def inject(self, target: Target, load: Load) -> None:
        self.there(target).run("pkill -9 -x raylet")

    def undo(self, target: Target) -> None:
        self.there(target).run("ray stop --force", 60, check=False)
        cluster_of(target).start_ray(self.there(target))


@dataclass
class LoseProxy(HostFault):
    """SIGKILL, or SIGSTOP for good, to Serve's proxy on a host; clients have the others."""

    hold_s: float = 0.0
    limit_s: float = WORKER_S
    is_frozen: bool = False

    @property
    def name(self) -> str:
        return f"{'freeze' if self.is_frozen else 'kill'} the {self.host} host's proxy"

    def inject(self, target: Target, load: Load) -> None:
        (proxy,) = (
            one for one in self.processes(target) if MARKS["proxy"] in " ".join(one.cmdline())
        )
        proxy.suspend() if self.is_frozen else proxy.kill()


@dataclass
class KillGcs(Fault):
    """SIGKILL to Ray's control store; what supervises it starts it again, from its disk."""

    title = "kill the GCS, back after {hold_s:g} s"
    hold_s: float = 5.0
    limit_s: float = NODE_S
    _command: list[str] = field(default_factory=list, init=False)

    def inject(self, target: Target, load: Load) -> None:
        (gcs,) = target.processes("gcs")
        self._command = gcs.cmdline()
        gcs.kill()

    def undo(self, target: Target) -> None:
        head = cluster_of(target).by_name["head"]
        head.run(f"nohup {shlex.join(self._command)} > /tmp/gcs.log 2>&1 &")


@dataclass
class Redeploy(Fault):
    """`serve deploy` of other settings; good ones are deployed again where they are broken."""

    title = "redeploy: {label}"
    label: str = "new version"
    settings: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False
    hold_s: float = 0.0
    limit_s: float = WORKER_S

    def inject(self, target: Target, load: Load) -> None:
        cluster = cluster_of(target)
        cluster.per_node = None
        cluster.deploy(**self.settings)
        if not self.is_broken:
            cluster.wait_for("RUNNING")

    def undo(self, target: Target) -> None:
        if self.is_broken:
            cluster_of(target).deploy()
            cluster_of(target).wait_for("RUNNING")


def host_faults() -> list[Fault]:
    """In the order in which they are run: new versions may put both of a role on one host."""
    return [
        BadLink(delay_s=0.2),
        BadLink(loss=0.05),
        BadLink(is_cut=True),
        LinkDown(host="decoder"),
        KillGcs(),
        LoseProxy(),
        LoseProxy(is_frozen=True),
        LoseHost(host="encoder"),
        LoseHost(host="decoder"),
        LoseHost(host="spare"),
        KillRaylet(),
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
