"""The workers of a simulated cell: how they are started, placed, replaced, drained and ended.

The real autoscaling policy decides how many there are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster.messages import ROLES, Location, Role
from cluster.planning.scenario import Cluster
from cluster.planning.simulation.decoders import SimDecoder
from cluster.planning.simulation.encoders import SimEncoder
from cluster.planning.simulation.parts import CellParts, Records
from cluster.planning.simulation.pools import Replica, SimPool
from cluster.planning.simulation.worker import Device, SimWorker
from cluster.serve.app import DEEPEST_BATCH, DRAIN_S, MOST_ROWS, STATS_PERIOD_S, UNBOUNDED
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.replica_count import Balancer
from cluster.settings import PoolSettings

DETECTED_S = 0.1  # until those who wait for a dead process hear of it: at most, in a real server
IDLE_LOOK_S = 0.2  # between two looks whether a draining worker is done
PoolName = str  # "encoder", "decoder" or "worker"


@dataclass(slots=True)
class Crew:
    """All pools. wanted: workers of each pool, those that are starting included."""

    cell: CellParts
    cluster: Cluster
    records: Records
    pools: dict[PoolName, SimPool] = field(default_factory=dict)
    wanted: dict[PoolName, int] = field(default_factory=dict)
    starting: dict[PoolName, int] = field(default_factory=dict)
    _numbers: dict[PoolName, int] = field(default_factory=dict)

    def open(self) -> None:
        """Start what the scenario has; at second 0 all of it is ready."""
        counts = {"worker": self.cluster.encoders}
        if self.cluster.placement == "split":
            counts = {"encoder": self.cluster.encoders, "decoder": self.cluster.decoders}
        for name, count in counts.items():
            self.pools[name] = SimPool()
            self.wanted[name], self.starting[name] = count, 0
            for _ in range(count):
                self._add(name)

    def pool_of(self, role: Role) -> tuple[PoolName, SimPool]:
        name = "worker" if "worker" in self.pools else role
        return name, self.pools[name]

    def resize(self, name: PoolName, workers: int) -> None:
        """Have so many workers: start some, or drain some."""
        pool, before = self.pools[name], self.wanted[name]
        self.wanted[name] = workers
        for _ in range(workers - before):
            self._start(name)
        for _ in range(before - workers):
            open_ones = pool.open()
            if not open_ones:
                break
            self._drain(name, min(open_ones, key=lambda one: one.ongoing))

    def kill(self, role: Role, count: int, at_s: float) -> None:
        """End so many workers at once. Serve starts as many in their place."""
        name, pool = self.pool_of(role)
        for replica in list(pool.open())[:count]:
            for worker in replica.roles.values():
                worker.kill(DETECTED_S)
            self.records.note(at_s, f"{replica.replica_id} is killed", "fault")
            loop = asyncio.get_running_loop()
            loop.call_later(DETECTED_S, pool.remove, replica)
            loop.call_later(DETECTED_S, self._start, name)

    def lose_rack(self, share: float, at_s: float) -> None:
        """End this share of each pool at once, one worker of each at least."""
        for name, pool in self.pools.items():
            role: Role = "decoder" if name == "decoder" else "encoder"
            self.kill(role, max(1, round(share * len(pool.open()))), at_s)

    def workers(self, role: Role) -> list[SimWorker]:
        """Of all replicas that there are, also of those that drain."""
        _, pool = self.pool_of(role)
        return [replica.roles[role] for replica in pool.replicas]

    def tell_stats(self) -> None:
        """Each worker reports its load to Serve."""
        for name, pool in self.pools.items():
            role: Role = "decoder" if name == "decoder" else "encoder"
            for replica in pool.open():
                replica.routing_stats = replica.roles[role].load().as_stats()

    def _start(self, name: PoolName) -> None:
        times = self.cell.profile.start_s
        after_s = times.decoder if name == "decoder" else times.encoder
        self.starting[name] += 1
        asyncio.get_running_loop().call_later(after_s, self._started, name)

    def _started(self, name: PoolName) -> None:
        self.starting[name] -= 1
        if len(self.pools[name].open()) < self.wanted[name]:
            self._add(name)

    def _drain(self, name: PoolName, replica: Replica) -> None:
        self.pools[name].drain(replica)
        for worker in replica.roles.values():
            worker.begin_drain()
        now_s = asyncio.get_running_loop().time()
        self._end_when_idle(name, replica, now_s + DRAIN_S)

    def _end_when_idle(self, name: PoolName, replica: Replica, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < until_s and not all(one.is_idle() for one in replica.roles.values()):
            loop.call_later(IDLE_LOOK_S, self._end_when_idle, name, replica, until_s)
            return
        for worker in replica.roles.values():
            worker.kill(0.0)
        self.pools[name].remove(replica)

    def _add(self, name: PoolName) -> None:
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        replica_id, node = f"{name}-{number}", self._node(name, number)
        location, device = Location(node, ""), Device()
        roles: dict[Role, SimWorker] = {}
        settings = self.cell.settings
        if name != "decoder":
            roles["encoder"] = SimEncoder(replica_id, location, self.cell, device)
        if name != "encoder":
            roles["decoder"] = SimDecoder(replica_id, location, self.cell, device)
        most: dict[PoolName, int] = {
            "encoder": 4 * (settings.encoder.max_batch or DEEPEST_BATCH),
            "decoder": settings.decoder.max_waiting + (settings.decoder.max_batch or MOST_ROWS),
            "worker": UNBOUNDED,
        }
        stats: dict[str, Any] = {}
        self.pools[name].add(
            Replica(
                replica_id,
                node,
                {"domain": ""},
                stats,
                roles,
                most[name],
                self.cell.profile.router.hop_s,
            )
        )

    def _node(self, name: PoolName, number: int) -> str:
        if not self.cluster.per_node:
            return "node"
        return f"{name}-node-{number // self.cluster.per_node}"


PERIOD_S = STATS_PERIOD_S  # Serve asks somewhat more often, about figures of this age


class Scaler:
    """Both pools of a cell. Pools whose settings give no room stay as they are."""

    def __init__(self, crew: Crew) -> None:
        settings = crew.cell.settings
        self._crew = crew
        self._balancer = Balancer()
        self._pools: dict[Role, PoolSettings] = {
            "encoder": settings.encoder,
            "decoder": settings.decoder,
        }
        rules = settings.scaling.model_dump()
        self._policies = {role: PoolPolicy(role, "simulated", rules) for role in ROLES}

    @property
    def is_needed(self) -> bool:
        is_split = self._crew.cluster.placement == "split"
        return is_split and any(pool.is_scaled for pool in self._pools.values())

    def decide(self, now_s: float) -> None:
        """Ask for each pool in its turn, and do what it says."""
        for role in ROLES:
            pool = self._pools[role]
            if not pool.is_scaled:
                continue
            before = self._crew.wanted[role]
            context: Any = self._context(role, pool, now_s)
            decision, _ = self._policies[role].decide(context, self._balancer)
            if decision.workers != before:
                what = f"{role}s: {before} to {decision.workers}"
                self._crew.records.note(now_s, what, decision.reason)
                self._crew.resize(role, decision.workers)

    def _context(self, role: Role, settings: PoolSettings, now_s: float) -> SimpleNamespace:
        """What the policy reads of Serve's `AutoscalingContext`."""
        pool = self._crew.pools[role]
        told: dict[str, dict[str, float]] = {}
        for replica in pool.open():
            for name, value in replica.roles[role].signals().items():
                told.setdefault(name, {})[replica.replica_id] = value
        running = [replica.replica_id for replica in pool.open()]
        return SimpleNamespace(
            target_num_replicas=self._crew.wanted[role],
            running_replicas=running,
            aggregated_metrics=told,
            total_queued_requests=pool.waiting,
            total_num_requests=pool.waiting + sum(one.ongoing for one in pool.replicas),
            capacity_adjusted_min_replicas=settings.fewest,
            capacity_adjusted_max_replicas=settings.most,
            current_time=now_s,
        )
