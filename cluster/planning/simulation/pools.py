"""Pools of simulated workers, and what Ray Serve does between a router and them.

The choice of a worker is the real hook's (`LoadAwareRouter`), and a router's client is the real
`ServePool`. Serve's own part is modelled after its code: it takes the first worker in the hook's
order that has room for one more call, or else pauses, from 25 ms up to 0.5 s, and asks again. A
place that was found goes to the call that has waited longest, whoever found it.
Colocated workers are chosen as Serve does without a hook: of two at random the one with fewer
calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.request_router import FIFOMixin, RequestRouter

from cluster.messages import DecodeRequest, EncodeRequest, Role, WorkerLoad
from cluster.planning.simulation.worker import SimWorker
from cluster.serve.hooks.replica_choice import LoadAwareRouter
from cluster.serve.worker_choice import WorkLedger

FIRST_PAUSE_S, LAST_PAUSE_S = 0.025, 0.5  # of Serve, between two tries to find room


@dataclass(slots=True, eq=False)
class Replica:
    """A worker as Serve knows it. The first four are what the hook reads of a `RunningReplica`.

    roles: of a colocated worker both.
    """

    replica_id: str
    node_id: str
    replica_metadata: dict[str, str]
    routing_stats: dict[str, Any]
    roles: Mapping[Role, SimWorker]
    max_ongoing: int
    hop_s: float = 0.0
    ongoing: int = 0

    @property
    def first_worker(self) -> SimWorker:
        return next(iter(self.roles.values()))

    def has_room(self) -> bool:
        return self.ongoing < self.max_ongoing


class _WithoutServe(FIFOMixin, RequestRouter):
    """What the hook inherits of Serve and does not use for its choice."""

    def __init__(self) -> None:
        """Nothing of Serve is there."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve notes them."""


class Choice(LoadAwareRouter, _WithoutServe):
    """The real hook, made without Serve."""

    def __init__(
        self, ledger: WorkLedger, chance: Random, clock: Callable[[], float], *, asks: bool
    ) -> None:
        """asks: Serve tells no loads of this pool, so workers are asked, which takes a hop."""
        self.initialize_state(ledger=ledger, chance=chance, asks=asks, clock=clock)
        self._deployment_id: Any = id(self)

    async def prepare(self, pending: Any) -> None:
        """What the hook does before Serve asks it to choose."""
        if self._sample is not None:
            await self._ask_before(self._sample, pending)

    @property
    def replica_queue_len_cache(self) -> Any:
        """Serve's, which is not there: it never has to ask for a length."""
        return SimpleNamespace(get=lambda _: 0)

    async def _load_of(self, replica: Any) -> WorkerLoad:
        await asyncio.sleep(replica.hop_s)
        load: WorkerLoad = replica.first_worker.load()
        return load


Chooser = Callable[[list[Replica], Any], Awaitable[list[Replica]]]


def by_load(choice: Choice) -> Chooser:
    """In the order of the hook."""

    async def choose(replicas: list[Replica], pending: Any) -> list[Replica]:
        candidates: Any = replicas
        ranks: Any = await choice.choose_replicas(candidates, pending)
        return [replica for rank in ranks for replica in rank]

    return choose


def of_two(chance: Random) -> Chooser:
    """Serve's own choice."""

    async def choose(replicas: list[Replica], pending: Any) -> list[Replica]:
        pair = chance.sample(replicas, min(2, len(replicas)))
        return sorted(pair, key=lambda one: one.ongoing)

    return choose


@dataclass(slots=True, eq=False)
class SimPool:
    """The workers of one deployment. changed: set when there are others."""

    replicas: list[Replica] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # calls that no worker has taken
    _open: list[Replica] = field(default_factory=list)

    def open(self) -> list[Replica]:
        """Those that take new calls; not to be changed."""
        return self._open

    def add(self, replica: Replica) -> None:
        """It takes calls from now on."""
        self.replicas.append(replica)
        self._open = [*self._open, replica]
        self.changed.set()
        self.changed = asyncio.Event()

    def drain(self, replica: Replica) -> None:
        """It takes nothing new."""
        self._open = [one for one in self._open if one is not replica]

    def remove(self, replica: Replica) -> None:
        """It takes nothing any more; harmless when it is gone already."""
        self.drain(replica)
        if replica in self.replicas:
            self.replicas.remove(replica)


class _Pending:
    """What the hook reads and writes of Serve's `PendingRequest`, and of its `routing_context`."""

    __slots__ = ("args", "should_backoff")

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.should_backoff = False

    @property
    def routing_context(self) -> _Pending:
        return self


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call without a worker."""

    pending: _Pending
    found: asyncio.Future[Replica]


class SimHandle:
    """In the place of a deployment handle, for one router; `ServePool` calls it."""

    def __init__(self, pool: SimPool, role: Role, choose: Chooser, choice: Choice | None) -> None:
        self._pool = pool
        self._role = role
        self._choose = choose
        self._choice = choice
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()  # of calls without a worker, the oldest first

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=self._remote)

    def tell_stats(self) -> None:
        """What the workers have reported reaches this router."""
        if self._choice is not None:
            replicas: Any = self._pool.open()
            self._choice.update_replicas(replicas)

    def _remote(self, request: EncodeRequest | DecodeRequest) -> SimCall:
        return SimCall(self._call(request))

    async def _call(self, request: EncodeRequest | DecodeRequest) -> Any:
        replica = await self._find(request)
        answer = replica.roles[self._role].call(request)
        try:
            return await answer
        except RayActorError:
            self._pool.remove(replica)  # as Serve's router does when a call finds it dead
            raise
        finally:
            replica.ongoing -= 1
            if not answer.done():
                answer.cancel()

    async def _find(self, request: EncodeRequest | DecodeRequest) -> Replica:
        """A worker with room, in which this call has its place already."""
        pool, pending = self._pool, _Pending((request,))
        was_tried = not self._queue and bool(pool.open())  # nobody has waited longer
        if was_tried:
            pool.waiting += 1
            try:
                replica = await self._first_with_room(pending)
            finally:
                pool.waiting -= 1
            if replica is not None:
                self._give(pending, replica)
                return replica
        return await self._wait_for_room(pending, was_tried=was_tried)

    async def _wait_for_room(self, pending: _Pending, *, was_tried: bool) -> Replica:
        """Try and pause, as Serve does, until it is this call's turn."""
        pool = self._pool
        waiting = _Waiting(pending, self._loop.create_future())
        self._queue.append(waiting)
        pause_s = FIRST_PAUSE_S
        pool.waiting += 1
        try:
            while not waiting.found.done():
                if not pool.open():
                    await pool.changed.wait()
                    continue
                if not was_tried:
                    await self._serve_oldest()
                was_tried = False
                if not waiting.found.done():
                    await asyncio.wait((waiting.found,), timeout=pause_s)
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
            return waiting.found.result()
        except asyncio.CancelledError:
            if waiting.found.done():
                waiting.found.result().ongoing -= 1
            raise
        finally:
            pool.waiting -= 1
            if not waiting.found.done():
                self._queue.remove(waiting)

    async def _serve_oldest(self) -> None:
        """Give the first worker in order with room to the call that has waited longest."""
        if not self._queue:
            return
        replica = await self._first_with_room(self._queue[0].pending)
        if replica is not None and self._queue:
            oldest = self._queue.popleft()
            self._give(oldest.pending, replica)
            oldest.found.set_result(replica)

    async def _first_with_room(self, pending: _Pending) -> Replica | None:
        """The first in the order of the choice that takes one more call."""
        if self._choice is not None:
            await self._choice.prepare(pending)
        for replica in await self._choose(self._pool.open(), pending):
            if replica.has_room():
                return replica
        return None

    def _give(self, pending: _Pending, replica: Replica) -> None:
        """The call has its place there."""
        replica.ongoing += 1
        if self._choice is not None:
            routed: Any = (pending, replica.replica_id, None)
            self._choice.on_request_routed(*routed)


class SimCall:
    """In the place of a `DeploymentResponse`: awaited once. Its caller's cancellation ends it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        found: Generator[Any, None, Any] = self._call.__await__()
        return found

    def cancel(self) -> None:
        """The coroutine has ended with its caller."""
