"""What simulated workers are made of: a clock, a device, calls of those who wait, and KV's way.

An engine's step returns at once, with the worker's own clock ahead of the loop's by what it would
have taken. A step decides all at its beginning, so this is exact; what it hands out is given to
others when the loop's clock has come so far.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from random import Random
from typing import Any

from ray.exceptions import RayActorError

from cluster.common.clock import Clock
from cluster.common.errors import KVLostError, PeerLostError, SplitscribeError
from cluster.common.kv.handles import release_message, renewal_messages
from cluster.common.kv.peers import HeldHandles
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import FetchStats
from cluster.common.messages import CrossKVHandle
from cluster.common.model.dims import ModelDims
from cluster.common.model.encoder_context import EncoderContext
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.scenario import LoadRequest

LOST_AFTER_S = 0.005  # until a READ from a dead process fails: 0.2 to 31 ms, 1 in the median
TICK_S = 1e-6  # of rounding, between two times that are the same


@dataclass(slots=True)
class Cell:
    """What all workers and routers of one simulated cell share.

    settings: with every `auto` resolved. requests: under way; a decoder sees their texts' lengths.
    """

    profile: Profile
    settings: Settings
    clock: Clock
    random: Random
    links: Links
    tokenizer: WhisperTokenizer
    dims: ModelDims
    context: EncoderContext | None
    requests: dict[str, LoadRequest] = field(default_factory=dict)


class WorkerClock:
    """Monotonic seconds of one thread of a worker; `now` is the event loop's."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._loop_now = now
        self._ahead_to_s = 0.0

    def now(self) -> float:
        now_s, ahead_to_s = self._loop_now(), self._ahead_to_s
        return now_s if now_s > ahead_to_s else ahead_to_s  # quicker than max()

    def wait_until(self, at_s: float) -> None:
        self._ahead_to_s = max(self._ahead_to_s, at_s)


class Device:
    """A worker's device, or some processes: `n_lanes` things at a time, first come first served.

    The roles of a colocated worker have one device together.
    """

    def __init__(self, n_lanes: int = 1) -> None:
        self.busy_s = 0.0
        self._free_at_s = [0.0] * n_lanes  # a heap

    def launch(self, now_s: float, seconds: float) -> float:
        """When something is done that is launched now and takes so long."""
        done_s = max(now_s, self._free_at_s[0]) + seconds
        heapreplace(self._free_at_s, done_s)
        self.busy_s += seconds
        return done_s


class SimWorker(ABC):
    """One role of one replica. core: the real engine. pool: whose pages are counted."""

    core: Any
    pool: PagePool

    def __init__(self, node: str, cell: Cell, device: Device) -> None:
        self.node = node
        self.device = device
        self.is_dead = False
        self.loop = asyncio.get_running_loop()
        self.clock = WorkerClock(self.loop.time)
        self._hop_s = cell.profile.router.hop_s  # that an answer is under way
        self._turn_at: asyncio.TimerHandle | None = None
        self._calls: dict[asyncio.Future[float], None] = {}  # in order: a seed gives one result

    @abstractmethod
    def turn(self) -> float | None:
        """One step of the engine's loop; seconds until the next one, None: when it is woken."""

    @abstractmethod
    def look_after_leases(self) -> None: ...

    @abstractmethod
    def signals(self) -> Any:
        """The dataclass that it reports to the autoscaler."""

    @abstractmethod
    def is_idle(self) -> bool: ...

    def abandon(self, submitted: Future[Any]) -> None:
        """The caller left when the engine had its answer already; what it held came with that."""
        del submitted

    async def call(self, request: Any) -> Any:
        """May be cancelled at any time. Raises RayActorError: the worker was killed."""
        if self.is_dead:
            await asyncio.sleep(self._hop_s)
            raise RayActorError
        try:
            submitted = self.core.submit(request)
        except SplitscribeError:
            await asyncio.sleep(self._hop_s)
            raise
        answered_s: asyncio.Future[float] = self.loop.create_future()  # by the worker's clock
        submitted.add_done_callback(partial(self._on_done, answered_s))
        self._calls[answered_s] = None
        self.wake()
        try:
            await asyncio.sleep(await answered_s + self._hop_s - self.loop.time())
        except asyncio.CancelledError:
            if not self.is_dead and not submitted.cancel():
                self.abandon(submitted)
            self.wake()
            raise
        finally:
            del self._calls[answered_s]
        if self.is_dead:
            raise RayActorError
        return submitted.result()

    def wake(self) -> None:
        if not self.is_dead:
            self._turn_by(self.clock.now())

    def kill(self, detected_after_s: float) -> None:
        self.is_dead = True
        if self._turn_at is not None:
            self._turn_at.cancel()
        for answered_s in self._calls:
            self.loop.call_later(detected_after_s, _fail, answered_s)

    def _turn_by(self, at_s: float) -> None:
        if self._turn_at is not None:
            if self._turn_at.when() <= at_s:
                return
            self._turn_at.cancel()
        self._turn_at = self.loop.call_at(at_s, self._take_turn)

    def _take_turn(self) -> None:
        self._turn_at = None
        free_at_s = self.clock.now()
        if free_at_s > self.loop.time() + TICK_S:  # it was woken in a turn, before that had ended
            self._turn_by(free_at_s)
        elif (wait_s := self.turn()) is not None:
            self._turn_by(self.clock.now() + wait_s)

    def _on_done(self, answered_s: asyncio.Future[float], submitted: Future[Any]) -> None:
        if not submitted.cancelled() and not self.is_dead and not answered_s.done():
            answered_s.set_result(self.clock.now())


def _fail(answered_s: asyncio.Future[float]) -> None:
    if not answered_s.done():
        answered_s.set_exception(RayActorError())


@dataclass(slots=True)
class Links:
    """All links of a cell. within: of one node; between: of two nodes, each with one port.

    exporters: the encoders, by agent; each has `node`, `is_dead` and `on_notification`.
    """

    within: LinkProfile
    between: LinkProfile
    exporters: dict[str, Any] = field(default_factory=dict)
    _free_at_s: dict[str, float] = field(default_factory=dict)

    def read_s(self, n_bytes: int, source: str, target: str, now_s: float) -> float:
        """Seconds until a READ that is posted now has ended; it takes its ports until then."""
        link = self.within if source == target else self.between
        ports = () if source == target else (f"out {source}", f"in {target}")
        begin_s = max([now_s, *(self._free_at_s.get(port, 0.0) for port in ports)])
        moved_s = begin_s + n_bytes / link.bytes_per_s
        self._free_at_s.update(dict.fromkeys(ports, moved_s))
        return moved_s + link.latency_s - now_s


class SimImporter:
    """In the place of `KVImporter`; the pool is a real one without memory."""

    def __init__(
        self, pool: PagePool, links: Links, node: str, clock: Callable[[], float], timeout_s: float
    ) -> None:
        self.pool, self.layout = pool, pool.layout
        self._links = links
        self._node = node
        self._clock = clock
        self._timeout_s = timeout_s
        self._held = HeldHandles(clock)
        self._loop = asyncio.get_running_loop()

    def accept(self, handle: CrossKVHandle) -> None:
        self._held.hold(handle)

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        arrival: Future[FetchStats] = Future()
        try:
            self._held.begin_fetch(handle)
        except KVLostError as error:
            arrival.set_exception(error)
            return arrival
        source, now_s = self._links.exporters[handle.agent], self._clock()
        n_bytes = len(pages) * self.pool.filled_bytes(handle.frames)
        seconds = self._links.read_s(n_bytes, source.node, self._node, now_s)
        stats = FetchStats(n_bytes, seconds, "simulated")
        if seconds > self._timeout_s:
            self._loop.call_at(now_s + self._timeout_s, self._give_up, handle, arrival)
        else:
            ends_s = now_s + (LOST_AFTER_S if source.is_dead else seconds)
            self._loop.call_at(ends_s, self._arrive, handle, stats, arrival)
        return arrival

    def drop(self, handle: CrossKVHandle) -> None:
        if self._held.let_go(handle.lease):
            self._links.exporters[handle.agent].on_notification(release_message(handle.lease))

    def renew(self) -> None:
        for agent in sorted(self._held.agents()):
            for message in renewal_messages(self._held.leases_of(agent)):
                self._links.exporters[agent].on_notification(message)

    def _arrive(
        self, handle: CrossKVHandle, stats: FetchStats, arrival: Future[FetchStats]
    ) -> None:
        if self._links.exporters[handle.agent].is_dead:
            self._held.lose(handle.agent)
            arrival.set_exception(PeerLostError(f"exporter {handle.agent} is gone"))
        else:
            self.drop(handle)
            arrival.set_result(stats)

    def _give_up(self, handle: CrossKVHandle, arrival: Future[FetchStats]) -> None:
        """The real one keeps the pages in quarantine until the READ ends; here it has ended."""
        self.drop(handle)
        arrival.set_exception(KVLostError(f"the READ took more than {self._timeout_s:g} s"))
