"""What became of a deployed application, in words that a person follows.

Knows what Serve calls things (application, deployment, replica) and tells how many workers of each
pool run, what they wait for, and why a deployment failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.serve.ray_environment import APP_NAME


@dataclass(frozen=True, slots=True)
class Pool:
    """One deployment. Its message says what it waits for, or why it failed."""

    name: str
    running: int
    wanted: int
    status: str
    message: str

    @property
    def is_ready(self) -> bool:
        return self.status == "HEALTHY" and self.running >= self.wanted


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """An application and its deployments. deployed_at changes with each deployment."""

    status: str
    message: str
    pools: tuple[Pool, ...]
    deployed_at: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.status == "RUNNING" and all(pool.is_ready for pool in self.pools)

    def line(self) -> str:
        """`router 1/1, encoder 0/2, decoder 2/2`"""
        return ", ".join(f"{pool.name} {pool.running}/{pool.wanted}" for pool in self.pools)

    def reason(self) -> str:
        """What went wrong: the message of the exception, which is the last line."""
        texts = [pool.message for pool in self.pools if not pool.is_ready and pool.message]
        for text in (*texts, self.message):
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return re.sub(r"^[\w.]+Error: ", "", lines[-1])
        return self.status


def state_of(details: Mapping[str, Any], application: str = APP_NAME) -> ApplicationState | None:
    """From what Ray's dashboard tells of Serve; None: there is no such application."""
    found = details.get("applications", {}).get(application)
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
    """From `serve.status()` of this process's cluster; None: there is no such application."""
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
    """As a request passes them."""
    return tuple(
        sorted(
            pools,
            key=lambda pool: (pool.name != "router", pool.name.startswith("decoder"), pool.name),
        )
    )
