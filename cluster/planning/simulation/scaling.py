"""Autoscaling of simulated pools: the real policy, asked as Serve's controller asks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.messages import ROLES, Role
from cluster.planning.simulation.crew import Crew
from cluster.serve.app import STATS_PERIOD_S
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.replica_count import Balancer
from cluster.settings import PoolSettings

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
