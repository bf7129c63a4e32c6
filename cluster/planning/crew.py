"""The workers of a simulated cell: how they are started, placed, scaled, drained, and ended.

The number of workers is the real policy's (`PoolPolicy`), asked as Serve's controller asks it.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from cluster.common.messages import ROLES, Role
from cluster.planning.pools import Replica, SimPool
from cluster.planning.report import Records
from cluster.planning.roles import SimDecoder, SimEncoder
from cluster.planning.scenario import Cluster
from cluster.planning.worker import Cell, Device, SimWorker
from cluster.serve.app import DEEPEST_BATCH, DRAIN_S, MOST_ROWS, UNBOUNDED
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.replica_count import Balancer

DETECTED_S = 0.1  # until those who wait for a dead process hear of it: at most, in a real server
IDLE_LOOK_S = 0.2  # between two looks whether a draining worker is done


class Crew:
    """All pools: of encoders and decoders, or of colocated workers, which are both."""

    def __init__(self, cell: Cell, cluster: Cluster, records: Records) -> None:
        """At second 0 all of them are ready."""
        self._cell = cell
        self._cluster = cluster
        self._records = records
        self._loop = asyncio.get_running_loop()
        settings = cell.settings
        self._scaled: tuple[Role, ...] = ()
        self.pools: dict[Role, SimPool] = dict.fromkeys(ROLES, SimPool("worker", cluster.encoders))
        if cluster.placement == "split":
            self.pools["encoder"] = SimPool("encoder", cluster.encoders)
            self.pools["decoder"] = SimPool("decoder", cluster.decoders)
            self._scaled = tuple(role for role in ROLES if getattr(settings, role).is_scaled)
        rules = settings.scaling.model_dump()
        self._policies = {role: PoolPolicy(role, "simulated", rules) for role in ROLES}
        self._balancer = Balancer()
        for pool in self.every():
            for _ in range(pool.wanted):
                self._add(pool)

    def every(self) -> tuple[SimPool, ...]:
        """Each pool once."""
        return tuple(dict.fromkeys(self.pools.values()))

    def workers(self, role: Role) -> list[SimWorker]:
        """Of all replicas that there are, also of those that drain."""
        return [replica.roles[role] for replica in self.pools[role].replicas]

    def kill(self, pool: SimPool, count: int) -> None:
        """End so many workers at once. Serve starts as many in their place."""
        for replica in pool.opened[:count]:
            replica.kill(DETECTED_S)
            self._records.note(self._loop.time(), f"{replica.replica_id} is killed", "fault")
            self._loop.call_later(DETECTED_S, pool.remove, replica)
            self._loop.call_later(DETECTED_S, self._start, pool)

    def scale(self) -> None:
        """Ask the policy for each pool whose settings give room, and do what it says."""
        for role in self._scaled:
            pool = self.pools[role]
            context: Any = self._context(role, pool)
            decision, _ = self._policies[role].decide(context, self._balancer)
            if decision.workers != pool.wanted:
                what = f"{role}s: {pool.wanted} to {decision.workers}"
                self._records.note(self._loop.time(), what, decision.reason)
                self._resize(pool, decision.workers)

    def _context(self, role: Role, pool: SimPool) -> SimpleNamespace:
        """What the policy reads of Serve's `AutoscalingContext`."""
        settings = getattr(self._cell.settings, role)
        told: dict[str, dict[str, float]] = {}
        for replica in pool.opened:
            for name, value in asdict(replica.roles[role].signals()).items():
                told.setdefault(name, {})[replica.replica_id] = value
        return SimpleNamespace(
            target_num_replicas=pool.wanted,
            running_replicas=[replica.replica_id for replica in pool.opened],
            aggregated_metrics=told,
            total_queued_requests=pool.waiting,
            total_num_requests=pool.waiting + sum(one.ongoing for one in pool.replicas),
            capacity_adjusted_min_replicas=settings.fewest,
            capacity_adjusted_max_replicas=settings.most,
            current_time=self._loop.time(),
        )

    def _resize(self, pool: SimPool, workers: int) -> None:
        before, pool.wanted = pool.wanted, workers
        for _ in range(workers - before):
            self._start(pool)
        for replica in sorted(pool.opened, key=lambda one: one.ongoing)[: before - workers]:
            pool.drain(replica)
            for worker in replica.roles.values():
                worker.core.begin_drain()
            self._end_when_idle(pool, replica, self._loop.time() + DRAIN_S)

    def _start(self, pool: SimPool) -> None:
        times = self._cell.profile.start_s
        pool.starting += 1
        after_s = times.decoder if pool.name == "decoder" else times.encoder
        self._loop.call_later(after_s, self._started, pool)

    def _started(self, pool: SimPool) -> None:
        pool.starting -= 1
        if len(pool.opened) < pool.wanted:
            self._add(pool)

    def _end_when_idle(self, pool: SimPool, replica: Replica, until_s: float) -> None:
        is_idle = all(worker.is_idle() for worker in replica.roles.values())
        if self._loop.time() < until_s and not is_idle:
            self._loop.call_later(IDLE_LOOK_S, self._end_when_idle, pool, replica, until_s)
        else:
            replica.kill(0.0)
            pool.remove(replica)

    def _add(self, pool: SimPool) -> None:
        cell, per_node, name = self._cell, self._cluster.per_node, f"{pool.name}-{pool.made}"
        node = f"{pool.name}-node-{pool.made // per_node}" if per_node else "node"
        pool.made += 1
        device, most = Device(), UNBOUNDED
        roles: dict[Role, SimWorker] = {}
        encoder, decoder = cell.settings.encoder, cell.settings.decoder
        if pool is self.pools["encoder"]:
            roles["encoder"] = SimEncoder(name, node, cell, device)
            most = 4 * (encoder.max_batch or DEEPEST_BATCH)
        if pool is self.pools["decoder"]:
            roles["decoder"] = SimDecoder(name, node, cell, device)
            most = decoder.max_waiting + (decoder.max_batch or MOST_ROWS)
        most = UNBOUNDED if len(roles) == len(ROLES) else most
        pool.add(Replica(name, node, roles, most))
