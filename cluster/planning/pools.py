"""Pools of simulated workers, and what Ray Serve does between a router and them.

The choice of a worker is the real hook's (`LoadAwareRouter`), and a router's client is the real
`ServePool`. Serve's own part is modelled after its code: it takes the first worker in the hook's
order that has room for one more call, or else pauses, from 25 ms up to 0.5 s, and asks again. Each
waiting call does so, and a place that was found goes to the one that has waited longest.
Colocated workers are chosen as Serve does without a hook: of two at random the one with fewer
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.request_router import FIFOMixin, RequestRouter

from cluster.common.messages import Role
from cluster.planning.worker import SimWorker
from cluster.serve.hooks.replica_choice import LoadAwareRouter
from cluster.serve.own_calls import OwnCalls

FIRST_PAUSE_S, LAST_PAUSE_S = 0.025, 0.5  # of Serve, between two tries to find room


@dataclass(slots=True, eq=False)
class Replica:
    """A worker as Serve knows it; the hook reads its ids and `replica_metadata`.

    roles: of a colocated worker both.
    """

    replica_id: str
    node_id: str
    roles: Mapping[Role, SimWorker]
    max_ongoing: int
    replica_metadata: dict[str, str] = field(default_factory=lambda: {"domain": ""})
    ongoing: int = 0

    def kill(self, detected_after_s: float) -> None:
        for worker in self.roles.values():
            worker.kill(detected_after_s)


@dataclass(slots=True, eq=False)
class SimPool:
    """The workers of one deployment. opened: those that take new calls, replaced as a whole.

    wanted: workers, those that are starting included. changed: set when one was added.
    """

    name: str
    wanted: int
    starting: int = 0
    made: int = 0
    waiting: int = 0  # calls that no worker has taken
    replicas: list[Replica] = field(default_factory=list)
    opened: list[Replica] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, replica: Replica) -> None:
        """It takes calls from now on."""
        self.replicas.append(replica)
        self.opened = [*self.opened, replica]
        self.changed.set()
        self.changed = asyncio.Event()

    def drain(self, replica: Replica) -> None:
        """It takes nothing new."""
        self.opened = [one for one in self.opened if one is not replica]

    def remove(self, replica: Replica) -> None:
        """It is gone; harmless when it is gone already."""
        self.drain(replica)
        if replica in self.replicas:
            self.replicas.remove(replica)


class _WithoutServe(FIFOMixin, RequestRouter):
    """What the hook inherits of Serve and does not use for its choice."""

    def __init__(self) -> None:
        """Nothing of Serve is there."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve notes them."""


class Choice(LoadAwareRouter, _WithoutServe):
    """The real hook, made without Serve."""

    def __init__(self, calls: OwnCalls, chance: Random) -> None:
        self.initialize_state(calls=calls, chance=chance)
        self._deployment_id: Any = id(self)
        self._told: Any = None  # the workers of which it knows

    async def order(self, replicas: Any, pending: Any) -> list[Replica]:
        """Those to be tried."""
        if replicas is not self._told:
            self.update_replicas(replicas)
            self._told = replicas
        ranks: Any = await self.choose_replicas(replicas, pending)
        return [replica for rank in ranks for replica in rank]


class OfTwo:
    """Serve's own choice."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    async def order(self, replicas: list[Replica], _pending: Any) -> list[Replica]:
        pair = self._chance.sample(replicas, min(2, len(replicas)))
        return sorted(pair, key=lambda one: one.ongoing)

    def on_request_routed(self, *_: Any) -> None:
        """It keeps no count."""


class _Pending:
    """What the hook reads and writes of Serve's `PendingRequest`, and of its `routing_context`."""

    __slots__ = ("args", "should_backoff")

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.should_backoff = False

    @property
    def routing_context(self) -> _Pending:
        return self


class SimHandle:
    """In the place of a deployment handle, for one router; `ServePool` calls it."""

    def __init__(self, pool: SimPool, role: Role, choice: Any) -> None:
        """choice: `Choice` or `OfTwo`."""
        self._pool = pool
        self._role = role
        self._choice = choice
        self._first = asyncio.Lock()  # of the call that has waited longest; it is fair
        self._waiting = 0

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda request: SimCall(self._call(request)))

    async def _call(self, request: Any) -> Any:
        pool = self._pool
        pool.waiting += 1
        self._waiting += 1
        try:
            replica = await self._find(_Pending((request,)))
        finally:
            pool.waiting -= 1
            self._waiting -= 1
        worker: Any = replica.roles[self._role]
        answer = worker.call(request)
        try:
            return replace(await answer, load=worker.core.load())
        except RayActorError:
            pool.remove(replica)  # as Serve's router does when a call finds it dead
            raise
        finally:
            replica.ongoing -= 1
            if not answer.done():
                answer.cancel()

    async def _find(self, pending: _Pending) -> Replica:
        """A worker with room, in which this call has its place already."""
        pool, pause_s = self._pool, FIRST_PAUSE_S
        async with self._first:
            while True:
                if not pool.opened:
                    await pool.changed.wait()
                if (replica := await self._with_room(pending)) is not None:
                    return replica
                await asyncio.sleep(pause_s / self._waiting)  # as often as all of them would try
                pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _with_room(self, pending: _Pending) -> Replica | None:
        """The first in the order of the choice that takes one more call, which it has now."""
        order: list[Replica] = await self._choice.order(self._pool.opened, pending)
        for replica in order:
            if replica.ongoing < replica.max_ongoing:
                replica.ongoing += 1
                self._choice.on_request_routed(pending, replica.replica_id, None)
                return replica
        return None


class SimCall:
    """In the place of a `DeploymentResponse`: awaited once. Its caller's cancellation ends it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Any:
        return self._call.__await__()

    def cancel(self) -> None:
        """The coroutine has ended with its caller."""
