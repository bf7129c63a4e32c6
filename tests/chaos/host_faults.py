"""Faults of whole hosts, of the network between them, and of new versions."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from tests.chaos.faults import NODE_S, WORKER_S, Fault
from tests.chaos.load import Load
from tests.chaos.several_hosts import HostTarget
from tests.chaos.target import MARKS, Target

NOT_RAY = ("sshd", "sleep infinity")
Act = Callable[[HostTarget], object]


@dataclass
class HostFault(Fault):
    title = "{what}"
    what: str = ""
    begin: Act = lambda _: None
    end: Act = lambda _: None
    limit_s: float = NODE_S

    def inject(self, target: Target, load: Load) -> None:
        self.begin(target.hosts)

    def undo(self, target: Target) -> None:
        self.end(target.hosts)


def bad_link(how: str, percent: int) -> HostFault:
    return HostFault(
        what=f"encoder-decoder link {how} for 15 s",
        begin=lambda hosts: hosts.lose_packets(percent),
        end=lambda hosts: hosts.lose_packets(0),
        hold_s=15.0,
    )


def lose_host(name: str) -> HostFault:
    """As if its power went: silent at once, for the others too. Later it comes back, empty."""

    def begin(hosts: HostTarget) -> None:
        hosts.by_name[name].run("ip link set eth0 down")
        for process in reversed(hosts.processes(name)):
            with suppress(psutil.Error):
                if not any(one in " ".join(process.cmdline()) for one in NOT_RAY):
                    process.kill()

    def end(hosts: HostTarget) -> None:
        hosts.by_name[name].run("ip link set eth0 up")
        hosts.start_ray(name)

    return HostFault(what=f"lose the {name} host", begin=begin, end=end, hold_s=30.0)


def restart_ray(hosts: HostTarget) -> None:
    hosts.by_name["spare"].run("ray stop --force", 60, check=False)
    hosts.start_ray("spare")


def kill_gcs(hosts: HostTarget) -> None:
    (gcs,) = hosts.marked("head", MARKS["gcs"])
    hosts.gcs_command = shlex.join(gcs.cmdline())
    gcs.kill()


def proxy_fault(how: str, act: Callable[[psutil.Process], object]) -> HostFault:
    return HostFault(
        what=f"{how} the spare host's proxy",
        begin=lambda hosts: [act(one) for one in hosts.marked("spare", MARKS["proxy"])],
        limit_s=WORKER_S,
    )


def redeploy(label: str, broken_s: float = 0.0, **settings: Any) -> HostFault:
    """broken_s: seconds with `settings` that cannot work, before good ones are deployed."""

    def begin(hosts: HostTarget) -> None:
        hosts.per_node = None
        hosts.deploy(**settings)
        if not broken_s:
            hosts.wait_for("RUNNING")

    def end(hosts: HostTarget) -> None:
        if broken_s:
            hosts.deploy()
            hosts.wait_for("RUNNING")

    what = f"redeploy: {label}"
    return HostFault(what=what, begin=begin, end=end, hold_s=broken_s, limit_s=WORKER_S)


def host_faults() -> list[Fault]:
    """In the order in which they are run: new versions may put both of a role on one host."""
    return [
        bad_link("losing 5%", 5),
        bad_link("cut", 100),
        HostFault(  # shorter than it takes to be given up for lost
            what="decoder host off the network for 4 s",
            begin=lambda hosts: hosts.by_name["decoder"].run("ip link set eth0 down"),
            end=lambda hosts: hosts.by_name["decoder"].run("ip link set eth0 up"),
            hold_s=4.0,
        ),
        HostFault(
            what="kill the GCS, back after 5 s",
            begin=kill_gcs,
            end=lambda hosts: hosts.by_name["head"].run(
                f"nohup {hosts.gcs_command} > /tmp/gcs.log 2>&1 &"
            ),
            hold_s=5.0,
        ),
        proxy_fault("kill", psutil.Process.kill),
        proxy_fault("freeze", psutil.Process.suspend),
        *map(lose_host, ("encoder", "decoder", "spare")),
        HostFault(
            what="kill the spare host's raylet",
            begin=lambda hosts: hosts.by_name["spare"].run("pkill -9 -x raylet"),
            end=restart_ray,
            hold_s=20.0,
        ),
        redeploy("new version", decoder={"max_batch": 8}, encoder={"batch_wait_ms": 4.0}),
        redeploy("another KV layout", page_frames=750),
        redeploy("a model that is not there", broken_s=15.0, model="/no/such"),
        redeploy("workers that cannot start", broken_s=40.0, page_frames=7),
    ]
