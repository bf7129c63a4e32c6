"""KV on its way between simulated workers: links that take time, and the real ends.

The encoder's end is the real `KVExporter` with its pages, leases, generations and kept windows;
only its wire is nobody. The decoder's end keeps the real `HeldHandles`, and a READ is a wait: the
link's latency, and bytes over its rate, one READ after another at each node's port. When it ends
it releases the lease as a real one does, by a notification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import KVLostError, PeerLostError
from cluster.kv.exporter import KVExporter
from cluster.kv.handles import release_message, renewal_messages
from cluster.kv.peers import HeldHandles
from cluster.kv.pool import PagePool
from cluster.kv.transfer_config import RENEW_S, FetchStats
from cluster.messages import CrossKVHandle, Location
from cluster.planning.profile import LinkProfile

LOST_AFTER_S = 0.005  # until a READ from a dead process fails: 0.2 to 31 ms, 1 in the median


class NobodysWire:
    """The wire of an exporter whose readers call it directly. See `cluster.kv.wires.wire.Wire`."""

    transport = "simulated"
    metadata = b""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.on_notification: Callable[[], object] = lambda: None

    def open(self, pool: PagePool, counters: Any) -> None:
        """Nothing is registered."""

    def drain(self) -> Sequence[bytes]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


class NoThread:
    """In the place of `WireThread`: starts at once, and runs nothing."""

    failure: str | None = None

    def __init__(
        self,
        owner: str,
        start: Callable[[], None],
        run: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._end = end
        start()

    def join(self) -> None:
        self._end()


class Arrival:
    """In the place of a READ's `Future`, without its locks: all is on one thread."""

    __slots__ = ("_callback", "_error", "_stats")

    def __init__(self) -> None:
        self._callback: Callable[[Arrival], object] | None = None
        self._stats: FetchStats | None = None
        self._error: BaseException | None = None

    def end(self, stats: FetchStats | None, error: BaseException | None = None) -> None:
        """It has ended, well or with an error."""
        self._stats, self._error = stats, error
        if self._callback is not None:
            self._callback(self)

    def add_done_callback(self, callback: Callable[[Arrival], object]) -> None:
        self._callback = callback
        if self._stats is not None or self._error is not None:
            callback(self)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> FetchStats | None:
        return self._stats


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
    location: Location
    on_release: Callable[[], None]
    is_alive: bool = True


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
        link = self.within
        ports: tuple[str, ...] = ()
        if source != target:
            link, ports = self.between, (f"out {source}", f"in {target}")
        begin_s = max([now_s, *(self._free_at_s.get(port, 0.0) for port in ports)])
        moved_s = begin_s + n_bytes / link.bytes_per_s
        for port in ports:
            self._free_at_s[port] = moved_s
        seconds = moved_s + link.latency_s - now_s
        told = self.traffic.setdefault((source, target), Traffic())
        told.n_reads += 1
        told.n_bytes += n_bytes
        told.seconds += seconds
        return seconds


class SimImporter:
    """In the place of `KVImporter`; the pool is a real one without memory."""

    transport = "simulated"

    def __init__(
        self,
        pool: PagePool,
        links: Links,
        node: str,
        clock: Callable[[], float],
        fetch_timeout_s: float,
    ) -> None:
        """clock: of the worker's thread."""
        self.pool = pool
        self.layout = pool.layout
        self._links = links
        self._node = node
        self._clock = clock
        self._timeout_s = fetch_timeout_s
        self._held = HeldHandles(clock)
        self._loop = asyncio.get_running_loop()
        self._renewing = False

    def accept(self, handle: CrossKVHandle) -> None:
        """Hold a handle, and renew its lease from here on."""
        self._held.hold(handle)
        if not self._renewing:
            self._renewing = True
            self._loop.call_later(RENEW_S, self._renew)

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Arrival:
        """As `KVImporter.fetch`."""
        arrival = Arrival()
        try:
            self._held.begin_fetch(handle)
        except KVLostError as error:
            arrival.end(None, error)
            return arrival
        source = self._links.exported[handle.agent]
        now_s = self._clock()
        n_bytes = len(pages) * self.pool.filled_bytes(handle.frames)
        seconds = self._links.read_s(n_bytes, source.location.node, self._node, now_s)
        if seconds > self._timeout_s:
            self._loop.call_at(now_s + self._timeout_s, self._give_up, handle, arrival)
            return arrival
        if not source.is_alive:
            seconds = LOST_AFTER_S
        self._loop.call_at(now_s + seconds, self._arrive, handle, n_bytes, seconds, arrival)
        return arrival

    def drop(self, handle: CrossKVHandle) -> None:
        """Release the lease of a handle that is not wanted; harmless when it is fetched."""
        if self._held.let_go(handle.lease):
            self._tell(handle.agent, release_message(handle.lease))

    def refused(self) -> Mapping[str, int]:
        return self._held.refused()

    def healthy(self) -> str | None:
        """None: a simulated wire does not fail by itself."""
        return None

    def _arrive(
        self, handle: CrossKVHandle, n_bytes: int, seconds: float, arrival: Arrival
    ) -> None:
        source = self._links.exported[handle.agent]
        if not source.is_alive:
            self._held.lose(handle.agent)
            arrival.end(None, PeerLostError(f"exporter {handle.agent} is gone"))
            return
        self._held.let_go(handle.lease)
        self._tell(handle.agent, release_message(handle.lease))
        arrival.end(FetchStats(n_bytes, seconds, self.transport))

    def _give_up(self, handle: CrossKVHandle, arrival: Arrival) -> None:
        """The real one keeps the pages in quarantine until the READ ends; here it has ended."""
        self.drop(handle)
        arrival.end(None, KVLostError(f"the READ took more than {self._timeout_s:g} s"))

    def _renew(self) -> None:
        agents = self._held.agents()
        for agent in sorted(agents):
            for message in renewal_messages(self._held.leases_of(agent)):
                self._tell(agent, message)
        self._renewing = bool(agents)
        if agents:
            self._loop.call_later(RENEW_S, self._renew)

    def _tell(self, agent: str, message: bytes) -> None:
        source = self._links.exported[agent]
        if source.is_alive:
            source.exporter.handle_notifications([message])
            source.on_release()
