"""Ray Serve's hook for choosing a replica, over `cluster.serve.worker_choice`.

Each process with a handle makes one for each pool. Serve's interface demands four things. The class
is sent by value, so what it shares lies in modules that it imports. All calls of one HTTP request
have the same id, with which Serve's usual matching loses all but one of them, hence `FIFOMixin`. An
answer without replicas spins unless `should_backoff` is set. An exception hangs the request.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Hashable
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.common.messages import Location
from cluster.serve import own_calls  # looked up in it: by value its object would be a copy
from cluster.serve.own_calls import OwnCalls, key_of
from cluster.serve.worker_choice import Members, work_of

logger = logging.getLogger("ray.serve")

N_TRIED = 3  # Serve asks each of them that it takes for full; then it pauses, and asks us again
N_EXPORTED = 16  # workers of a pool up to which each router exports Serve's metric of each worker


class LoadAwareRouter(FIFOMixin, RequestRouter):
    """Chooses by `cluster.serve.worker_choice.Members`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction; others may hand in `calls` and `chance`."""
        self._calls: OwnCalls = kwargs.get("calls", own_calls.OWN_CALLS)
        self._chance: random.Random = kwargs.get("chance", random.Random())
        self._known: dict[Hashable, RunningReplica] = {}
        self._members = Members()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the set, or what a replica reports of itself, has changed."""
        super().update_replicas(replicas)
        known: dict[Hashable, RunningReplica] = {one.replica_id: one for one in replicas}
        for gone in self._known.keys() - known.keys():
            self._calls.forget(gone)
        if known.keys() != self._known.keys():
            self._members = Members({key: _location(one) for key, one in known.items()})
        self._known = known
        self._calls.sizes[str(self._deployment_id)] = len(known)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best few, the best one first: Serve takes the first with room for one more."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
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
        """Called by Serve when a replica took it: the first in our order may have been full."""
        request = _request_of(pending_request)
        if work_of(request):
            self._calls.move(replica_id, key_of(request))

    def _update_router_queue_len_gauge(
        self, replica_id: ReplicaID, queue_len: int, *, force: bool = False
    ) -> None:
        """Serve's metric of each worker in each router: too many series in a large pool."""
        if len(self._known) <= N_EXPORTED:
            super()._update_router_queue_len_gauge(replica_id, queue_len, force=force)


def _request_of(pending_request: PendingRequest) -> Any:
    return pending_request.args[0] if pending_request.args else None


def _location(replica: RunningReplica) -> Location:
    return Location(replica.node_id or "", str(replica.replica_metadata.get("domain", "")))
