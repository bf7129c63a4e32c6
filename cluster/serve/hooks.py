"""Ray Serve's hooks for the number of workers of a pool, and for the choice of a worker.

Serve pickles both classes by value, so state that they share must lie in imported modules.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Hashable
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.common.messages import Role
from cluster.common.signals import DecoderSignals, EncoderSignals

# Shared state is looked up in these modules: named in this one it would be pickled as a copy.
from cluster.serve import own_calls, replica_count
from cluster.serve.own_calls import OwnCalls, key_of
from cluster.serve.replica_count import Balancer, Decision, PoolView, ScalingRules
from cluster.serve.worker_choice import Members, work_of

logger = logging.getLogger("ray.serve")

SIGNALS = {"encoder": EncoderSignals, "decoder": DecoderSignals}
USUAL_WINDOW_S = 0.2  # assumed encoder time of a call that no worker has taken
USUAL_ROWS = 16  # assumed rows of a decoder
N_TRIED = 3  # Serve probes each one that may be full, then pauses and calls `choose_replicas` again
N_EXPORTED = 16  # largest pool for which each router exports Serve's queue metric of each worker


class PoolPolicy:
    """The scaling policy of one pool, called in Serve's controller several times a second.

    `serve.run` cannot set a policy for all pools. Serve's delays are off: `Balancer` has its own.
    """

    def __init__(self, role: Role, model: str, rules: dict[str, Any]) -> None:
        self._role, self._model = role, model
        self._rules = ScalingRules(**rules)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        target = context.target_num_replicas
        try:
            balancer = replica_count.balancer_of(str(context.app_name), self._model)
            decision, view = self.decide(context, balancer)
        except Exception:
            logger.exception("scaling %s failed", context.deployment_name)
            return target, {}
        self._tell(context.deployment_name, target, decision, view)
        return decision.workers, {}

    def decide(self, context: AutoscalingContext, balancer: Balancer) -> tuple[Decision, PoolView]:
        view = self._view(context)
        bounds = {
            "min_workers": context.capacity_adjusted_min_replicas,
            "max_workers": context.capacity_adjusted_max_replicas,
        }
        rules = self._rules.model_copy(update=bounds)
        # `context.current_time` is the wall clock, which may be set back.
        return balancer.decide(self._role, rules, view, time.monotonic()), view

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
        if logger.isEnabledFor(logging.INFO):  # enabled by our log level DEBUG
            logger.info("scaling %s: %s", pool, json.dumps([asdict(view), asdict(decision)]))
        replica_count.record(pool, self._model, target, decision)
        if decision.workers != target:
            logger.warning(
                "%s: %d to %d workers (%s)", pool, target, decision.workers, decision.reason
            )


class LoadAwareRouter(FIFOMixin, RequestRouter):
    """Chooses workers by `Members`. Each process with a handle has one for each pool.

    `FIFOMixin` is needed because all calls of one HTTP request have the same id, by which Serve's
    default matching would lose all but one. An exception in a hook would hang the request.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction."""
        self._calls: OwnCalls = kwargs.get("calls", own_calls.OWN_CALLS)
        self._chance: random.Random = kwargs.get("chance", random.Random())
        self._known: dict[Hashable, RunningReplica] = {}
        self._members = Members()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        known: dict[Hashable, RunningReplica] = {one.replica_id: one for one in replicas}
        for gone in self._known.keys() - known.keys():
            self._calls.forget(gone)
        if known.keys() != self._known.keys():
            self._members = Members({key: one.node_id or "" for key, one in known.items()})
        self._known = known
        self._calls.sizes[str(self._deployment_id)] = len(known)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best few workers. Serve takes the first that is not full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else Serve spins
            try:
                request = _request_of(pending_request)
                order = self._members.choose(request, self._calls, self._chance)
                return [[self._known[key]] for key in order[:N_TRIED]]
            except Exception:
                logger.exception("choosing a worker failed; any will do")
        some = self._chance.sample(candidate_replicas, min(N_TRIED, len(candidate_replicas)))
        return [[replica] for replica in some]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Correct the record if Serve took another worker than the first."""
        request = _request_of(pending_request)
        if work_of(request):
            self._calls.move(replica_id, key_of(request))

    def _update_router_queue_len_gauge(
        self, replica_id: ReplicaID, queue_len: int, *, force: bool = False
    ) -> None:
        """Skip Serve's metric in a large pool, as each router would export one series a worker."""
        if len(self._known) <= N_EXPORTED:
            super()._update_router_queue_len_gauge(replica_id, queue_len, force=force)


def _request_of(pending_request: PendingRequest) -> Any:
    return pending_request.args[0] if pending_request.args else None
