"""KV on its way between simulated workers: links that take time, and the real ends.

The encoder's end is the real `KVExporter`; only its wire is nobody. The decoder's end keeps the
real `HeldHandles`, and a READ is a wait: the link's latency, and bytes over its rate, one READ
after another at each node's port. When it ends it releases the lease by a notification, as a real
one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cluster.common.errors import KVLostError, PeerLostError
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.handles import release_message, renewal_messages
from cluster.common.kv.peers import HeldHandles
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import RENEW_S, FetchStats
from cluster.common.messages import CrossKVHandle
from cluster.planning.profile import LinkProfile

LOST_AFTER_S = 0.005  # until a READ from a dead process fails: 0.2 to 31 ms, 1 in the median


class NobodysWire:
    """The wire of an exporter whose readers call it directly. See `common.kv.wire.Wire`."""

    transport = "simulated"
    metadata = b""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.on_notification: Callable[[], object] = lambda: None

    def open(self, pool: PagePool, counters: Any) -> None:
        """Nothing is registered."""


class NoThread:
    """In the place of `WireThread`: starts at once, and runs nothing."""

    failure: str | None = None

    def __init__(self, _owner: str, start: Callable[[], None], *_: Any) -> None:
        start()


@dataclass(slots=True)
class Traffic:
    """KV that went over one link. seconds: of all READs, from their post to their end."""

    n_reads: int = 0
    n_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Exported:
    """An encoder's end. on_release: called when pages may have come free."""

    exporter: KVExporter
    node: str
    on_release: Callable[[], None]
    is_alive: bool = True

    def tell(self, message: bytes) -> None:
        """A reader's notification."""
        if self.is_alive:
            self.exporter.handle_notifications([message])
            self.on_release()


@dataclass(slots=True)
class Links:
    """All links of a cell. within: of one node; between: of two nodes, each with one port."""

    within: LinkProfile
    between: LinkProfile
    exported: dict[str, Exported] = field(default_factory=dict)  # by agent
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)  # by nodes
    _free_at_s: dict[str, float] = field(default_factory=dict)

    def read_s(self, n_bytes: int, source: str, target: str, now_s: float) -> float:
        """Seconds until a READ that is posted now has ended; it takes its ports until then."""
        link = self.within if source == target else self.between
        ports = () if source == target else (f"out {source}", f"in {target}")
        begin_s = max([now_s, *(self._free_at_s.get(port, 0.0) for port in ports)])
        moved_s = begin_s + n_bytes / link.bytes_per_s
        self._free_at_s.update(dict.fromkeys(ports, moved_s))
        seconds = moved_s + link.latency_s - now_s
        told = self.traffic.setdefault((source, target), Traffic())
        told.n_reads += 1
        told.n_bytes += n_bytes
        told.seconds += seconds
        return seconds


class SimImporter:
    """In the place of `KVImporter`; the pool is a real one without memory."""

    def __init__(
        self, pool: PagePool, links: Links, node: str, clock: Callable[[], float], timeout_s: float
    ) -> None:
        """clock: of the worker's thread. timeout_s: of a READ."""
        self.pool, self.layout = pool, pool.layout
        self._links = links
        self._node = node
        self._clock = clock
        self._timeout_s = timeout_s
        self._held = HeldHandles(clock)
        self._loop = asyncio.get_running_loop()
        self._renewing = False

    def accept(self, handle: CrossKVHandle) -> None:
        """Hold a handle, and renew its lease from here on."""
        self._held.hold(handle)
        if not self._renewing:
            self._renewing = True
            self._loop.call_later(RENEW_S, self._renew)

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        """As `KVImporter.fetch`."""
        arrival: Future[FetchStats] = Future()
        try:
            self._held.begin_fetch(handle)
        except KVLostError as error:
            arrival.set_exception(error)
            return arrival
        source, now_s = self._links.exported[handle.agent], self._clock()
        n_bytes = len(pages) * self.pool.filled_bytes(handle.frames)
        seconds = self._links.read_s(n_bytes, source.node, self._node, now_s)
        stats = FetchStats(n_bytes, seconds, "simulated")
        if seconds > self._timeout_s:
            self._loop.call_at(now_s + self._timeout_s, self._give_up, handle, arrival)
        else:
            ends_s = now_s + (seconds if source.is_alive else LOST_AFTER_S)
            self._loop.call_at(ends_s, self._arrive, handle, stats, arrival)
        return arrival

    def drop(self, handle: CrossKVHandle) -> None:
        """Release the lease of a handle that is not wanted; harmless when it is fetched."""
        if self._held.let_go(handle.lease):
            self._links.exported[handle.agent].tell(release_message(handle.lease))

    def refused(self) -> Mapping[str, int]:
        return self._held.refused()

    def healthy(self) -> str | None:
        """None: a simulated wire does not fail by itself."""
        return None

    def _arrive(
        self, handle: CrossKVHandle, stats: FetchStats, arrival: Future[FetchStats]
    ) -> None:
        source = self._links.exported[handle.agent]
        if not source.is_alive:
            self._held.lose(handle.agent)
            arrival.set_exception(PeerLostError(f"exporter {handle.agent} is gone"))
            return
        self._held.let_go(handle.lease)
        source.tell(release_message(handle.lease))
        arrival.set_result(stats)

    def _give_up(self, handle: CrossKVHandle, arrival: Future[FetchStats]) -> None:
        """The real one keeps the pages in quarantine until the READ ends; here it has ended."""
        self.drop(handle)
        arrival.set_exception(KVLostError(f"the READ took more than {self._timeout_s:g} s"))

    def _renew(self) -> None:
        agents = self._held.agents()
        for agent in sorted(agents):
            for message in renewal_messages(self._held.leases_of(agent)):
                self._links.exported[agent].tell(message)
        self._renewing = bool(agents)
        if agents:
            self._loop.call_later(RENEW_S, self._renew)
