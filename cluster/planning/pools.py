"""Pools of simulated workers, and what Ray Serve does between a router and them.

`ServePool`, `Members` and `Balancer` are the real ones. Of Serve: a call goes to the first worker
in the order of `Members` at once, or waits where there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from cluster.common.messages import ROLES, Location, Role
from cluster.planning.cell import Cell
from cluster.planning.devices import Device
from cluster.planning.scenario import Cluster
from cluster.planning.workers import SimDecoder, SimEncoder, SimWorker
from cluster.serve.app import DRAIN_S
from cluster.serve.hooks import USUAL_ROWS, USUAL_WINDOW_S
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replica_count import Balancer, PoolView, ScalingRules
from cluster.serve.worker_choice import Members

DETECTED_S = 0.1  # until those who wait for a dead process hear of it: at most, in a real server
IDLE_LOOK_S = 0.2  # between two looks whether a draining worker is done
USUAL_CALL: dict[Role, float] = {"encoder": USUAL_WINDOW_S, "decoder": 1 / USUAL_ROWS}


@dataclass(slots=True, eq=False)
class Replica:
    """A worker as Serve knows it."""

    name: str
    node: str
    roles: Mapping[Role, SimWorker]
    ongoing: int = 0

    def kill(self, detected_after_s: float) -> None:
        for worker in self.roles.values():
            worker.kill(detected_after_s)


class SimPool:
    """replicas: all that run. opened: those that take new calls, replaced as a whole. changed: set
    when a worker was added. waiting: calls that no worker has taken.
    """

    def __init__(self, roles: tuple[Role, ...], size: int, cell: Cell, per_node: int) -> None:
        self.name = roles[0] if len(roles) == 1 else "worker"
        self.replicas: list[Replica] = []
        self.opened: list[Replica] = []
        self.waiting = 0
        self.changed = asyncio.Event()
        self._roles, self._cell, self._per_node, self._loop = roles, cell, per_node, cell.loop
        self._wanted = size  # workers, those that are starting included
        self._made = 0
        self._start_s = getattr(cell.profile.start_s, roles[0])
        settings = getattr(cell.settings, roles[0])
        self._rules = ScalingRules(
            **cell.settings.scaling.model_dump(),
            min_workers=settings.fewest,
            max_workers=settings.most,
        )
        self._is_scaled = len(roles) == 1 and settings.is_scaled
        for _ in range(size):
            self._add()

    def kill(self, count: int) -> None:
        for replica in self.opened[:count]:
            replica.kill(DETECTED_S)
            self._note(f"{replica.name} is killed", "fault")
            self._loop.call_later(DETECTED_S, self.remove, replica)
            self._loop.call_later(DETECTED_S + self._start_s, self._add)

    def scale(self, balancer: Balancer) -> None:
        """By what `PoolPolicy` reads of Serve."""
        if not self._is_scaled:
            return
        role, starting = self._roles[0], max(0, self._wanted - len(self.opened))
        queued = self.waiting + (0 if self.opened else sum(one.ongoing for one in self.replicas))
        signals: Any = {f"{role}s": tuple(one.roles[role].signals() for one in self.opened)}
        view = PoolView(self._wanted, queued * USUAL_CALL[role], starting, **signals)
        decision = balancer.decide(role, self._rules, view, self._loop.time())
        before, self._wanted = self._wanted, decision.workers
        if self._wanted != before:
            self._note(f"{self.name}s: {before} to {self._wanted}", decision.reason)
        for _ in range(self._wanted - before):
            self._loop.call_later(self._start_s, self._add)
        n_ended = max(0, before - self._wanted)
        for replica in sorted(self.opened, key=lambda one: one.ongoing)[:n_ended]:
            self._close(replica)
            for worker in replica.roles.values():
                worker.core.begin_drain()
            self._end_when_idle(replica, self._loop.time() + DRAIN_S)

    def _add(self) -> None:
        """A worker has started; nothing where it is not wanted any more."""
        if len(self.opened) >= self._wanted:
            return
        number, per_node, device = self._made, self._per_node, Device()
        name = f"{self.name}-{number}"
        node = f"{self.name}-node-{number // per_node}" if per_node else "node"
        self._made += 1
        kinds: dict[Role, Any] = {"encoder": SimEncoder, "decoder": SimDecoder}
        roles = {role: kinds[role](name, node, self._cell, device) for role in self._roles}
        replica = Replica(name, node, roles)
        self.replicas.append(replica)
        self.opened = [*self.opened, replica]
        self.changed.set()

    def _close(self, replica: Replica) -> None:
        self.opened = [one for one in self.opened if one is not replica]
        if not self.opened:
            self.changed.clear()

    def remove(self, replica: Replica) -> None:
        self._close(replica)
        if replica in self.replicas:
            self.replicas.remove(replica)

    def _end_when_idle(self, replica: Replica, until_s: float) -> None:
        is_idle = all(worker.is_idle() for worker in replica.roles.values())
        if self._loop.time() < until_s and not is_idle:
            self._loop.call_later(IDLE_LOOK_S, self._end_when_idle, replica, until_s)
        else:
            replica.kill(0.0)
            self.remove(replica)

    def _note(self, what: str, why: str) -> None:
        self._cell.outcome.note(self._loop.time(), what, why)


def make_pools(cell: Cell, cluster: Cluster) -> dict[Role, SimPool]:
    if cluster.placement == "colocated":
        return dict.fromkeys(ROLES, SimPool(ROLES, cluster.encoders, cell, cluster.per_node))
    sizes: dict[Role, int] = {"encoder": cluster.encoders, "decoder": cluster.decoders}
    return {role: SimPool((role,), n, cell, cluster.per_node) for role, n in sizes.items()}


class SimHandle:
    """In the place of a deployment handle and its hook, for one router; `ServePool` calls it."""

    def __init__(self, pool: SimPool, role: Role, calls: OwnCalls, cell: Cell) -> None:
        self._pool, self._role, self._calls, self._chance = pool, role, calls, cell.random
        self.deployment_id = role
        self._told: list[Replica] = []  # the workers of which the router knows
        self._known: dict[Hashable, Replica] = {}
        self._members = Members()

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda request: asyncio.create_task(self._call(request)))

    async def _call(self, request: Any) -> Any:
        pool = self._pool
        pool.waiting += 1
        try:
            while not pool.opened:
                await pool.changed.wait()
        finally:
            pool.waiting -= 1
        replica = self._chosen(request)
        replica.ongoing += 1
        worker = replica.roles[self._role]
        try:
            return replace(await worker.call(request), load=worker.core.load())
        except RayActorError:
            pool.remove(replica)  # as Serve's router does when a call finds it dead
            raise
        finally:
            replica.ongoing -= 1

    def _chosen(self, request: Any) -> Replica:
        """The choice of `LoadAwareRouter`."""
        if self._told is not self._pool.opened:
            self._told = self._pool.opened
            known: dict[Hashable, Replica] = {one.name: one for one in self._told}
            for gone in self._known.keys() - known.keys():
                self._calls.forget(gone)
            self._known = known
            self._members = Members({key: Location(one.node) for key, one in known.items()})
            self._calls.sizes[self.deployment_id] = len(known)
        return self._known[self._members.choose(request, self._calls, self._chance)[0]]
