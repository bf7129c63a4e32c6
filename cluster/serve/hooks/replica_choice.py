"""Ray Serve's hook for choosing a replica, over `cluster.serve.worker_choice`.

Each process with a handle makes one for each pool. Serve's interface demands four things. The
class is sent by value, so what it shares lies in a module that it imports. All calls of one HTTP
request have the same id, with which Serve's usual matching loses all but one of them, hence
`FIFOMixin`. An answer without replicas spins unless `should_backoff` is set. An exception hangs
the request.
"""

from __future__ import annotations

import logging
import random
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.messages import Location, WorkerLoad
from cluster.serve.hooks import ledger as process  # looked up in it: by value it would be a copy
from cluster.serve.worker_choice import Candidate, WorkLedger, key_of, ranked, shared_key, work_of

logger = logging.getLogger("ray.serve")

N_TRIED = 3  # Serve asks each of them that it takes for full; then it pauses, and asks us again


class LoadAwareRouter(FIFOMixin, RequestRouter):
    """Chooses by `cluster.serve.worker_choice.ranked`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction; others may hand in `ledger` and `chance`."""
        self._ledger: WorkLedger = kwargs.get("ledger", process.PROCESS_LEDGER)
        self._chance: random.Random = kwargs.get("chance", process.CHANCE)
        self._stats: dict[ReplicaID, dict[str, Any]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the set, or what a replica reports of itself, has changed."""
        super().update_replicas(replicas)
        reported = {replica.replica_id: replica.routing_stats for replica in replicas}
        for key in self._stats.keys() - reported.keys():
            self._ledger.forget(key)
        for key, stats in reported.items():
            if stats and stats is not self._stats.get(key):
                self._ledger.report(key, WorkerLoad.of_stats(stats).work)
        self._stats = reported

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best few, the best one first: Serve takes the first with room for one more."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        order: list[Any] = self._chance.sample(list(replicas), len(replicas))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            try:
                order = self._order(replicas, pending_request)
            except Exception:
                logger.exception("choosing a worker failed; any will do")
        return [[replicas[key]] for key in order[:N_TRIED]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Serve when a replica took it: the first in our order may have been full."""
        request: Any = pending_request.args[0] if pending_request.args else None
        if work_of(request):
            self._ledger.move(replica_id, key_of(request))

    def _order(
        self, replicas: dict[ReplicaID, RunningReplica], pending_request: PendingRequest
    ) -> list[Any]:
        request: Any = pending_request.args[0] if pending_request.args else None
        candidates = [self._candidate(replica) for replica in replicas.values()]
        kv_key = shared_key(request)
        order = ranked(request, candidates, self._chance, self._ledger.kept_at(kv_key))
        if work := work_of(request):
            call = key_of(request)
            failed = {candidate.key for candidate in candidates if candidate.load.failed}
            if (place := self._ledger.place_of(kv_key, call)) in replicas.keys() - failed:
                order.remove(place)  # there it is encoded already, so it is no more work
                order.insert(0, place)
                work = 0.0
            # Counted before it is sent: of windows that come together, the next must see it.
            self._ledger.send(order[0], call, work, kv_key)
        return order

    def _candidate(self, replica: RunningReplica) -> Candidate:
        return Candidate(
            replica.replica_id,
            WorkerLoad.of_stats(replica.routing_stats),
            Location(replica.node_id or "", str(replica.replica_metadata.get("domain", ""))),
            self._ledger.work(replica.replica_id),
        )
