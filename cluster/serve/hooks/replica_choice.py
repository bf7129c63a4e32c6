"""Ray Serve's hook for choosing a replica, over `cluster.serve.routing`.

Each process with a handle makes one for each pool. What Serve's interface demands: the class is
sent by value, so what is shared lies in the module it imports; all calls of one HTTP request have
the same id, with which Serve's usual matching loses all but one of them, hence `FIFOMixin`; an
answer without replicas spins unless `should_backoff` is set; an exception hangs the request.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.messages import Place, WorkerLoad
from cluster.serve.hooks import ledger  # looked up in it: by value it would be a copy
from cluster.serve.routing import Candidate, key_of, ranked, work_of

logger = logging.getLogger("ray.serve")

N_TRIED = 3  # Serve asks each of them that it takes for full; then it pauses, and asks us again


class LoadAwareRouter(FIFOMixin, RequestRouter):
    """Chooses by `cluster.serve.routing.ranked`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction."""
        self._stats: dict[ReplicaID, dict[str, Any]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the set, or what a replica told of itself, has changed."""
        super().update_replicas(replicas)
        told = {replica.replica_id: replica.routing_stats for replica in replicas}
        for key in self._stats.keys() - told.keys():
            ledger.PROCESS_LEDGER.forget(key)
        for key, stats in told.items():
            if stats and stats is not self._stats.get(key):
                ledger.PROCESS_LEDGER.told(key, WorkerLoad.of_stats(stats).work)
        self._stats = told

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best few, the best one first: Serve takes the first with room for one more."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        order: list[Any] = ledger.CHANCE.sample(list(replicas), len(replicas))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            try:
                order = _order(replicas, pending_request)
            except Exception:
                logger.exception("choosing a worker failed; any will do")
        return [[replicas[key]] for key in order[:N_TRIED]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Serve when a replica took it: the first in our order may have been full."""
        request: Any = pending_request.args[0] if pending_request.args else None
        if work_of(request):
            ledger.PROCESS_LEDGER.move(replica_id, key_of(request))


def _order(replicas: dict[ReplicaID, RunningReplica], pending_request: PendingRequest) -> list[Any]:
    request: Any = pending_request.args[0] if pending_request.args else None
    order = ranked(request, [_candidate(replica) for replica in replicas.values()], ledger.CHANCE)
    if work := work_of(request):
        # Counted before it is sent: of windows that come together, the next must see it.
        ledger.PROCESS_LEDGER.send(order[0], key_of(request), work)
    return order


def _candidate(replica: RunningReplica) -> Candidate:
    return Candidate(
        replica.replica_id,
        WorkerLoad.of_stats(replica.routing_stats),
        Place(replica.node_id or "", str(replica.replica_metadata.get("domain", ""))),
        ledger.PROCESS_LEDGER.work(replica.replica_id),
    )
