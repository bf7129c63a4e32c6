"""Ray Serve's hook for choosing a replica, over `cluster.serve.worker_choice`.

Each process with a handle makes one for each pool. In a pool that is told to ask (`asks`), Serve
tells no loads; the router asks workers for theirs, as `cluster.serve.hooks.load_sample` says.

Serve's interface demands four things. The class is sent by value, so what it shares lies in
modules that it imports. All calls of one HTTP request have the same id, with which Serve's usual
matching loses all but one of them, hence `FIFOMixin`. An answer without replicas spins unless
`should_backoff` is set. An exception hangs the request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Hashable
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
from cluster.serve.hooks.load_sample import LoadSample
from cluster.serve.ray_internals import routing_stats_of
from cluster.serve.worker_choice import Candidate, WorkLedger, key_of, ranked, shared_key, work_of

logger = logging.getLogger("ray.serve")

N_TRIED = 3  # Serve asks each of them that it takes for full; then it pauses, and asks us again
ANSWER_S = 0.02  # how long a window waits for answers; then older ones must do
SILENT_S = 2.0  # a worker without an answer for so long is taken for one of which nothing is known


class LoadAwareRouter(FIFOMixin, RequestRouter):
    """Chooses by `cluster.serve.worker_choice.ranked`."""

    _sample: LoadSample | None = None  # of a pool that asks

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction; others may hand in
        `ledger`, `chance` and `clock`.

        asks: Serve tells no loads of this pool.
        """
        self._ledger: WorkLedger = kwargs.get("ledger", process.PROCESS_LEDGER)
        self._chance: random.Random = kwargs.get("chance", process.CHANCE)
        self._stats: dict[ReplicaID, dict[str, Any]] = {}
        self._asking: set[asyncio.Task[None]] = set()  # held, or Python may drop them
        self._known: dict[Hashable, RunningReplica] = {}
        self._candidates: dict[Hashable, tuple[dict[str, Any], WorkerLoad, Location]] = {}
        if kwargs.get("asks"):
            clock = kwargs.get("clock", time.monotonic)
            self._sample = LoadSample(self._ledger, self._chance, clock)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the set, or what a replica reports of itself, has changed."""
        super().update_replicas(replicas)
        self._note_replicas(replicas)

    def _note_replicas(self, replicas: list[RunningReplica]) -> None:
        reported = {replica.replica_id: replica.routing_stats for replica in replicas}
        for key in self._stats.keys() - reported.keys():
            self._ledger.forget(key)
            self._candidates.pop(key, None)
        if self._sample is not None:
            process.LARGE_POOLS[str(self._deployment_id)] = len(replicas)
            self._known = {replica.replica_id: replica for replica in replicas}
            self._sample.update({replica.replica_id: _location(replica) for replica in replicas})
        else:
            for key, stats in reported.items():
                if stats and stats is not self._stats.get(key):
                    self._ledger.report(key, WorkerLoad.of_stats(stats).work)
        self._stats = reported

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's way in. Answers are waited for here, before the request has its place in line.

        If they were waited for later, a replica chosen for one request would go to another.
        """
        if self._sample is not None:
            try:
                await self._ask_before(self._sample, pending_request)
            except Exception:
                logger.exception("asking workers for their load failed")
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best few, the best one first: Serve takes the first with room for one more."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            try:
                if self._sample is not None:
                    return self._chosen(self._sample, pending_request)
                replicas = {replica.replica_id: replica for replica in candidate_replicas}
                order = self._order(replicas, pending_request)
                return [[replicas[key]] for key in order[:N_TRIED]]
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
            self._ledger.move(replica_id, key_of(request))

    def _update_router_queue_len_gauge(
        self, replica_id: ReplicaID, queue_len: int, *, force: bool = False
    ) -> None:
        """Serve's metric of each worker in each router: too many series in a large pool."""
        if self._sample is None:
            super()._update_router_queue_len_gauge(replica_id, queue_len, force=force)

    def _order(
        self, replicas: dict[ReplicaID, RunningReplica], pending_request: PendingRequest
    ) -> list[Any]:
        """All replicas, by the loads that Serve tells."""
        request = _request_of(pending_request)
        candidates = [self._candidate(replica) for replica in replicas.values()]
        kept_at = self._ledger.kept_at(shared_key(request))
        order = ranked(request, candidates, self._chance, kept_at)
        failed = {candidate.key for candidate in candidates if candidate.load.failed}
        return self._counted(request, order, lambda key: key in replicas and key not in failed)

    def _chosen(
        self, sample: LoadSample, pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        """The best few of those that were asked."""
        request, known = _request_of(pending_request), self._known
        kv_key = shared_key(request)
        candidates = sample.compared(request)
        order = ranked(
            request, candidates, self._chance, self._ledger.kept_at(kv_key), sample.owner(kv_key)
        )
        order = self._counted(request, order, sample.is_working)
        return [[known[key]] for key in order[:N_TRIED]]

    def _counted(
        self, request: Any, order: list[Any], is_working: Callable[[Hashable], bool]
    ) -> list[Any]:
        """The order with the worker first that has the same audio already; counted in the ledger.

        is_working: whether a worker is there and has not failed, by its key.
        """
        if work := work_of(request):
            call, kv_key = key_of(request), shared_key(request)
            place = self._ledger.place_of(kv_key, call)
            if place is not None and is_working(place):
                # There it is encoded already, so it is no more work.
                order = [place, *(key for key in order if key != place)]
                work = 0.0
            # Counted before it is sent: of windows that come together, the next must see it.
            self._ledger.send(order[0], call, work, kv_key)
        return order

    async def _ask_before(self, sample: LoadSample, pending_request: PendingRequest) -> None:
        """Ask those whom the choice should compare, and wait a moment for their answers."""
        request = _request_of(pending_request)
        if not work_of(request):
            return
        asked = [self._ask(sample, worker) for worker in sample.to_ask(request)]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_S)

    def _ask(self, sample: LoadSample, worker: Hashable) -> asyncio.Task[None]:
        sample.ask(worker)
        task = asyncio.get_running_loop().create_task(self._hear(sample, self._known[worker]))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _load_of(self, replica: RunningReplica) -> WorkerLoad:
        """Ask it."""
        return WorkerLoad.of_stats(await routing_stats_of(replica))

    async def _hear(self, sample: LoadSample, replica: RunningReplica) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                load = await self._load_of(replica)
        except Exception as error:  # it is gone, or frozen: its calls and Serve will find out
            logger.info("no load of %s: %r", replica.replica_id, error)
            sample.silent(replica.replica_id)
            return
        sample.heard(replica.replica_id, load)
        if self.replica_queue_len_cache.get(replica.replica_id) is None:
            # Else Serve would ask it once more, before it sends anything there.
            self.on_new_queue_len_info(replica.replica_id, math.ceil(load.work))

    def _candidate(self, replica: RunningReplica) -> Candidate:
        key, stats = replica.replica_id, replica.routing_stats
        known = self._candidates.get(key)
        if known is None or known[0] is not stats:  # it has reported since
            known = self._candidates[key] = stats, WorkerLoad.of_stats(stats), _location(replica)
        return Candidate(key, known[1], known[2], self._ledger.work(key))


def _request_of(pending_request: PendingRequest) -> Any:
    return pending_request.args[0] if pending_request.args else None


def _location(replica: RunningReplica) -> Location:
    return Location(replica.node_id or "", str(replica.replica_metadata.get("domain", "")))
