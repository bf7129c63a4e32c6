"""Ray Serve's hook for autoscaling, over `cluster.serve.replica_count`.

Serve's controller makes one for each pool, from a class sent by value; what the pools of a model
share is the balancer that the module below holds. Serve's own policy for a whole application would
see all pools at once, but is to be had by `serve deploy` alone, not by `serve.run`. Serve's delays
are off: `cluster.serve.replica_count` has its own, which know both pools.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.common.messages import DecoderSignals, EncoderSignals, Role
from cluster.serve.hooks import scaling_state  # looked up in it: by value it would be a copy
from cluster.serve.replica_count import (
    Balancer,
    Decision,
    PoolView,
    ScalingRules,
)

logger = logging.getLogger("ray.serve")

SIGNALS = {"encoder": EncoderSignals, "decoder": DecoderSignals}
USUAL_WINDOW_S = 0.2  # of encoder work in a call that nobody has taken
USUAL_ROWS = 16


class PoolPolicy:
    """The policy of one pool; its rules are the fields of `ScalingRules`."""

    def __init__(self, role: Role, model: str, rules: dict[str, Any]) -> None:
        self._role, self._model = role, model
        self._rules = ScalingRules(**rules)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Called by Serve several times a second; on an error things stay as they are."""
        target = context.target_num_replicas
        try:
            balancer = scaling_state.of(str(context.app_name), self._model)
            decision, view = self.decide(context, balancer)
        except Exception:
            logger.exception("scaling %s failed", context.deployment_name)
            return target, {}
        self._tell(context.deployment_name, target, decision, view)
        return decision.workers, {}

    def decide(self, context: AutoscalingContext, balancer: Balancer) -> tuple[Decision, PoolView]:
        """What the pool should have, and what it looks like; `balancer` is its model's."""
        view = self._view(context)
        rules = replace(
            self._rules,
            min_workers=context.capacity_adjusted_min_replicas,
            max_workers=context.capacity_adjusted_max_replicas,
        )
        return balancer.decide(self._role, rules, view, context.current_time or 0.0), view

    def _view(self, context: AutoscalingContext) -> PoolView:
        told = context.aggregated_metrics or {}
        kind = SIGNALS[self._role]
        names = list(asdict(kind()))
        workers = {replica for name in names for replica in told.get(name, {})}
        signals = tuple(
            kind(**{name: told[name][worker] for name in names if worker in told.get(name, {})})
            for worker in sorted(workers, key=str)
        )
        target, running = context.target_num_replicas, len(context.running_replicas)
        queued = float(context.total_queued_requests)
        if not running:
            queued = max(queued, float(context.total_num_requests))
        starting = max(0, target - running)
        if self._role == "encoder":
            return PoolView(target, queued * USUAL_WINDOW_S, starting, encoders=signals)
        return PoolView(target, queued / USUAL_ROWS, starting, decoders=signals)

    def _tell(self, pool: str, target: int, decision: Decision, view: PoolView) -> None:
        if logger.isEnabledFor(logging.INFO):  # at our log level DEBUG
            logger.info("scaling %s: %s", pool, json.dumps([asdict(view), asdict(decision)]))
        scaling_state.record(pool, self._model, target, decision)
        if decision.workers != target:
            logger.warning(
                "%s: %d to %d workers (%s)", pool, target, decision.workers, decision.reason
            )
