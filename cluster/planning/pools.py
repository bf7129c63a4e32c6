"""Pools of simulated workers, and what Ray Serve does between a router and them.

Hook, `ServePool` and `PoolPolicy` are the real ones. Of Serve: a call goes to the first worker in
the hook's order at once, or waits where there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.request_router import FIFOMixin, RequestRouter

from cluster.common.messages import ROLES, Role
from cluster.planning.report import Records
from cluster.planning.roles import SimDecoder, SimEncoder
from cluster.planning.scenario import Cluster
from cluster.planning.worker import Cell, Device, SimWorker
from cluster.serve.app import DRAIN_S
from cluster.serve.hooks import LoadAwareRouter, PoolPolicy
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replica_count import Balancer

DETECTED_S = 0.1  # until those who wait for a dead process hear of it: at most, in a real server
IDLE_LOOK_S = 0.2  # between two looks whether a draining worker is done


@dataclass(slots=True, eq=False)
class Replica:
    """A worker as Serve knows it; the hook reads its ids and `replica_metadata`."""

    replica_id: str
    node_id: str
    roles: Mapping[Role, SimWorker]
    replica_metadata: dict[str, str] = field(default_factory=lambda: {"domain": ""})
    ongoing: int = 0

    def kill(self, detected_after_s: float) -> None:
        for worker in self.roles.values():
            worker.kill(detected_after_s)


class SimPool:
    """opened: those that take new calls, replaced as a whole. wanted: workers, those that are
    starting included. waiting: calls that no worker has taken. changed: set when a worker was
    added.
    """

    def __init__(
        self, roles: tuple[Role, ...], size: int, cell: Cell, per_node: int, records: Records
    ) -> None:
        self.name = roles[0] if len(roles) == 1 else "worker"
        self.replicas: list[Replica] = []
        self.opened: list[Replica] = []
        self.wanted, self.waiting = size, 0
        self.changed = asyncio.Event()
        self._roles, self._cell, self._per_node, self._records = roles, cell, per_node, records
        self._made = 0
        self._loop = asyncio.get_running_loop()
        settings = cell.settings
        self._start_s = getattr(cell.profile.start_s, roles[0])
        self._policy: PoolPolicy | None = None
        if len(roles) == 1 and getattr(settings, self.name).is_scaled:
            self._policy = PoolPolicy(roles[0], "simulated", settings.scaling.model_dump())
        for _ in range(size):
            self._add()

    def kill(self, count: int) -> None:
        for replica in self.opened[:count]:
            replica.kill(DETECTED_S)
            self._records.note(self._loop.time(), f"{replica.replica_id} is killed", "fault")
            self._loop.call_later(DETECTED_S, self.remove, replica)
            self._loop.call_later(DETECTED_S + self._start_s, self._started)

    def scale(self, balancer: Balancer) -> None:
        if self._policy is None:
            return
        decision, _ = self._policy.decide(self._context(), balancer)
        before, self.wanted = self.wanted, decision.workers
        if self.wanted != before:
            what = f"{self.name}s: {before} to {self.wanted}"
            self._records.note(self._loop.time(), what, decision.reason)
        for _ in range(self.wanted - before):
            self._loop.call_later(self._start_s, self._started)
        n_ended = max(0, before - self.wanted)
        for replica in sorted(self.opened, key=lambda one: one.ongoing)[:n_ended]:
            self._close(replica)
            for worker in replica.roles.values():
                worker.core.begin_drain()
            self._end_when_idle(replica, self._loop.time() + DRAIN_S)

    def _context(self) -> Any:
        """What the policy reads of Serve's `AutoscalingContext`."""
        role = self._roles[0]
        settings = getattr(self._cell.settings, role)
        told: dict[str, dict[str, float]] = {}
        for replica in self.opened:
            for name, value in asdict(replica.roles[role].signals()).items():
                told.setdefault(name, {})[replica.replica_id] = value
        return SimpleNamespace(
            target_num_replicas=self.wanted,
            running_replicas=[replica.replica_id for replica in self.opened],
            aggregated_metrics=told,
            total_queued_requests=self.waiting,
            total_num_requests=self.waiting + sum(one.ongoing for one in self.replicas),
            capacity_adjusted_min_replicas=settings.fewest,
            capacity_adjusted_max_replicas=settings.most,
            current_time=self._loop.time(),
        )

    def _started(self) -> None:
        if len(self.opened) < self.wanted:
            self._add()

    def _add(self) -> None:
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
        self.changed = asyncio.Event()

    def _close(self, replica: Replica) -> None:
        self.opened = [one for one in self.opened if one is not replica]

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


def make_pools(cell: Cell, cluster: Cluster, records: Records) -> dict[Role, SimPool]:
    def pool(roles: tuple[Role, ...], size: int) -> SimPool:
        return SimPool(roles, size, cell, cluster.per_node, records)

    if cluster.placement == "colocated":
        return dict.fromkeys(ROLES, pool(ROLES, cluster.encoders))
    return {
        "encoder": pool(("encoder",), cluster.encoders),
        "decoder": pool(("decoder",), cluster.decoders),
    }


class _WithoutServe(FIFOMixin, RequestRouter):
    """What the hook inherits of Serve and does not use for its choice."""

    def __init__(self) -> None:
        pass

    def update_replicas(self, replicas: list[Any]) -> None:
        pass


class _Choice(LoadAwareRouter, _WithoutServe):
    """The real hook, made without Serve."""

    def __init__(self, calls: OwnCalls, chance: Random) -> None:
        self.initialize_state(calls=calls, chance=chance)
        self._deployment_id: Any = id(self)
        self._told: Any = None  # the workers of which it knows

    async def order(self, replicas: Any, pending: Any) -> list[Replica]:
        if replicas is not self._told:
            self.update_replicas(replicas)
            self._told = replicas
        ranks: Any = await self.choose_replicas(replicas, pending)
        return [replica for rank in ranks for replica in rank]


class SimHandle:
    """In the place of a deployment handle, for one router; `ServePool` calls it."""

    def __init__(self, pool: SimPool, role: Role, calls: OwnCalls, chance: Random) -> None:
        self._pool = pool
        self._role = role
        self._choice = _Choice(calls, chance)
        self.deployment_id = self._choice._deployment_id

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
        pending: Any = SimpleNamespace(args=(request,), routing_context=SimpleNamespace())
        replica = (await self._choice.order(pool.opened, pending))[0]
        replica.ongoing += 1
        worker: Any = replica.roles[self._role]
        try:
            return replace(await worker.call(request), load=worker.core.load())
        except RayActorError:
            pool.remove(replica)  # as Serve's router does when a call finds it dead
            raise
        finally:
            replica.ongoing -= 1
