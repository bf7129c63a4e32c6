"""The importer's thread: connects to exporters, renews leases, and sees each READ to its end.

Nothing here waits for a peer, so a slow one delays nobody else. A handle is held, and its lease
renewed, from `hold` until its payload was read or it is dropped. A successful fetch releases the
lease by the notification of its counter's read, so never before that read; a failed one releases it
at once. Pages of a read that timed out stay in quarantine until that read ends.

A peer is connected on first contact, warmed, and kept. It is lost when an operation on it raises
PeerLostError, refused for a while, and removed once nothing of it is in flight. A peer from which a
READ is overdue is refused until that READ ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from cluster.common.errors import (
    KVLostError,
    PeerLostError,
    StaleGenerationError,
    TransferTimeoutError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.kv.handles import release_message, renewal_messages
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import COUNTER_BYTES, FetchStats, TransferConfig, Wire, descriptors
from cluster.common.logs import log_fields
from cluster.common.messages import CrossKVHandle

logger = logging.getLogger(__name__)

POLL_S = 0.0005  # between looks at reads in flight
OVERDUE_POLL_S = 0.01  # the same when all of them are overdue
CLOSE_GRACE_S = 1.0  # how long close waits for reads in flight
# After a handle is accepted: it may have waited in a router for nearly as long as its lease lasts.
# A handle that is fetched sooner needs no renewal.
FIRST_RENEWAL_S = 0.2
RENEWALS_PER_LEASE = 3  # at least: an exporter of another version may lease for less time
LOST_S = 10.0  # how long a lost peer is refused before a new handle may connect to it again
MAX_PEERS = 512  # above it those that were not read from for longest are forgotten

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Fetch:
    """One handle on its way into `pages`."""

    handle: CrossKVHandle
    pages: tuple[int, ...]
    future: Future[FetchStats]
    posted: float = 0.0  # by the importer's clock; filled by the reader


@dataclass(eq=False, slots=True)
class Peer:
    """An exporter of which handles are, or were, held; times are of the importer's clock."""

    agent: str
    renew_s: float  # between two renewals
    last_used: float
    next_renewal: float = math.inf
    leases: dict[str, Fetch | None] = field(default_factory=dict)  # with the fetch once begun
    is_connected: bool = False
    in_flight: int = 0
    overdue: int = 0  # of those in flight; above 0 the peer is suspect
    lost: bool = False  # an operation on it failed


@dataclass(eq=False, slots=True)
class Read:
    token: object
    peer: Peer
    deadline: float
    fetch: Fetch | None  # None for the read that warms a connection
    then: Callable[[], None]  # called when it is done in time
    overdue: bool = False  # its fetch has failed, and it only keeps pages quarantined


class Reader:
    """Moves fetches along. One thread calls its methods, but for `check`; none waits for a peer."""

    def __init__(
        self, pool: PagePool, wire: Wire, config: TransferConfig, refuse: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._refuse = refuse  # counts a handle that is not taken, by its reason
        self._fetch_timeout_s, self._renew_s = config.fetch_timeout_s, config.renew_s
        self._clock = config.clock
        # Where counters land, by the first page of the fetch; the last is for warming reads.
        self._landing = np.zeros(pool.n_pages + 1, dtype=np.uint64)
        self._peers: dict[str, Peer] = {}  # by agent
        self._lost: dict[str, float] = {}  # by agent, when it was lost
        self._next_renewal = math.inf  # none is due before
        self._reads: list[Read] = []
        self._fetches: set[Fetch] = set()  # whose futures are not resolved yet
        self._closed = False

    def check(self, agent: str) -> None:
        """Raise PeerLostError if the peer was lost recently, or is suspect. From any thread."""
        peer, lost_at = self._peers.get(agent), self._lost.get(agent, -math.inf)
        if self._clock() - lost_at < LOST_S or (peer is not None and peer.lost):
            raise PeerLostError(f"encoder {agent} is gone")
        if peer is not None and peer.overdue:
            raise PeerLostError(f"encoder {agent} does not answer: an earlier READ is overdue")

    def open(self) -> None:
        self._wire.open(self._pool, self._landing)

    def hold(self, handle: CrossKVHandle) -> None:
        """Keep the lease of a verified handle alive, and connect to its exporter if need be."""
        if self._closed:
            return
        now = self._clock()
        try:
            peer = self._peer_of(handle.agent, now)
            if not peer.leases:
                peer.next_renewal = math.inf  # it may be long past
            peer.leases.setdefault(handle.lease, None)
            # Its exporter may lease for less time than we suppose.
            of_lease = max(FIRST_RENEWAL_S, handle.remaining_s / RENEWALS_PER_LEASE)
            peer.renew_s = min(peer.renew_s, of_lease)
            peer.next_renewal = min(peer.next_renewal, now + FIRST_RENEWAL_S)
            self._next_renewal = min(self._next_renewal, peer.next_renewal)
            self._connect(peer, handle)
        except WorkerError as error:  # the fetch will meet it again and report it
            fields = log_fields(handle.request_id, window=handle.window, peer=handle.agent)
            logger.warning("cannot connect to %s: %s", handle.agent, error, extra=fields)

    def drop(self, handle: CrossKVHandle) -> None:
        peer = self._peers.get(handle.agent)
        if peer is not None and handle.lease in peer.leases:
            self._release(peer, handle.lease)

    def start(self, fetch: Fetch) -> None:
        fetch.posted = self._clock()
        self._fetches.add(fetch)
        try:
            if self._closed:
                raise WorkerDrainingError("the KV importer is closed")
            peer = self._take_lease(fetch)
            self._connect(peer, fetch.handle)
            self.check(peer.agent)  # suspect, or lost by the read that warms it
            local = self._pool.addresses(fetch.pages)
            of_page = self._pool.filled_bytes(fetch.handle.frames)
            descs = descriptors(local, fetch.handle.addresses, of_page)
            read = partial(self._wire.read_pages, peer.agent, descs)
            self._post(read, peer, fetch, partial(self._read_counter, fetch, peer))
        except WorkerError as error:
            self._fail(fetch, error)

    def step(self) -> None:
        self._poll_all()
        if (now := self._clock()) >= self._next_renewal:
            self._renew(now)

    def wait_s(self) -> float | None:
        """How long the thread may wait for a command before the next `step`; None: for ever."""
        if self._reads:
            return OVERDUE_POLL_S if all(read.overdue for read in self._reads) else POLL_S
        due = self._next_renewal
        return max(0.0, due - self._clock()) if due < math.inf else None

    def close(self) -> None:
        """Release every lease, give reads in flight a moment, then close the wire."""
        self._closed = True
        try:
            self._release_all(but_fetching=True)
            end_s = time.monotonic() + CLOSE_GRACE_S
            while self._reads and time.monotonic() < end_s:
                self._poll_all()
                time.sleep(POLL_S)
            self._release_all()
        finally:
            self._peers.clear()
            self._wire.close()
            for read in tuple(self._reads):  # nothing writes any more
                self._end(read)
            for fetch in tuple(self._fetches):
                self._fail(fetch, WorkerDrainingError("the KV importer was closed"))

    def _take_lease(self, fetch: Fetch) -> Peer:
        lease, agent = fetch.handle.lease, fetch.handle.agent
        peer, problem = self._peers.get(agent), "is being fetched already"
        if peer is None or lease not in peer.leases:
            self.check(agent)  # a lost peer's handles are no longer held
            problem = "was not accepted, or was fetched or dropped"
        elif peer.leases[lease] is None:
            peer.leases[lease] = fetch
            return peer
        self._refuse("replayed")
        raise KVLostError(f"the KV handle {problem}")

    # Reads.

    def _poll_all(self) -> None:
        for read in tuple(self._reads):
            self._poll(read)

    def _poll(self, read: Read) -> None:
        try:
            done = self._ask(read.peer, partial(self._wire.poll, read.token))
        except WorkerError as error:
            self._end(read)
            if read.fetch is not None and not read.overdue:
                self._fail(read.fetch, error)
            return
        if done:
            self._end(read)
            if not read.overdue:
                read.then()
        elif not read.overdue and self._clock() >= read.deadline:
            self._give_up(read)

    def _read_counter(self, fetch: Fetch, peer: Peer) -> None:
        handle, slot = fetch.handle, fetch.pages[0]
        self._landing[slot] = handle.generation ^ 0xFFFF  # anything but what is expected
        message = release_message(handle.lease)
        peer.leases.pop(handle.lease, None)  # a renewal after the release would be for nothing
        here, there = self._landing_address(slot), handle.counter_address
        read = partial(self._wire.read_counter, peer.agent, here, there, message)
        try:
            self._post(read, peer, fetch, partial(self._finish, fetch))
        except WorkerError as error:
            self._fail(fetch, error)

    def _finish(self, fetch: Fetch) -> None:
        found = int(self._landing[fetch.pages[0]])
        if found != fetch.handle.generation:
            self._refuse("stale")
            error = StaleGenerationError(
                f"the KV of window {fetch.handle.window} was reused before it was read: "
                f"generation {found}, expected {fetch.handle.generation}"
            )
            self._fail(fetch, error)
            return
        n_bytes = len(fetch.pages) * self._pool.filled_bytes(fetch.handle.frames)
        seconds = self._clock() - fetch.posted
        self._fetches.discard(fetch)
        fetch.future.set_result(FetchStats(n_bytes, seconds, self._wire.transport))

    def _give_up(self, read: Read) -> None:
        """Fail the fetch of an overdue read, which cannot be cancelled: it may still write."""
        read.overdue = True
        read.peer.overdue += 1
        agent = read.peer.agent
        logger.warning(
            "a READ from %s is overdue: the peer is suspect", agent, extra=log_fields(peer=agent)
        )
        if read.fetch is not None:
            self._pool.quarantine(read.fetch.pages)
            error = TransferTimeoutError(
                f"reading window {read.fetch.handle.window} from {agent} took more than "
                f"{self._fetch_timeout_s:g} s"
            )
            self._fail(read.fetch, error)

    def _post(
        self,
        operation: Callable[[], object],
        peer: Peer,
        fetch: Fetch | None,
        then: Callable[[], None],
    ) -> None:
        """Post a read and poll it once, since a short one is done by then."""
        if peer.lost:  # by another read, so that it may be disconnected
            raise PeerLostError(f"encoder {peer.agent} is gone")
        token = self._ask(peer, operation)
        peer.in_flight += 1
        peer.last_used = self._clock()
        began = peer.last_used if fetch is None else fetch.posted
        read = Read(token, peer, began + self._fetch_timeout_s, fetch, then)
        self._reads.append(read)
        self._poll(read)

    def _end(self, read: Read) -> None:
        peer = read.peer
        self._reads.remove(read)
        peer.in_flight -= 1
        if read.overdue:
            peer.overdue -= 1
            if read.fetch is not None:
                self._pool.lift(read.fetch.pages)
        self._remove_if_lost(peer)

    def _fail(self, fetch: Fetch, error: WorkerError) -> None:
        peer = self._peers.get(fetch.handle.agent)
        if peer is not None and peer.leases.get(fetch.handle.lease) is fetch:
            self._release(peer, fetch.handle.lease)
        self._fetches.discard(fetch)
        fetch.future.set_exception(error)

    def _landing_address(self, slot: int) -> int:
        return int(self._landing.ctypes.data) + slot * COUNTER_BYTES

    # Peers.

    def _peer_of(self, agent: str, now: float) -> Peer:
        """Get or make the peer; raises PeerLostError if it was lost recently."""
        peer = self._peers.get(agent)
        if peer is None or peer.lost:
            self.check(agent)
            if len(self._peers) >= MAX_PEERS:
                self._make_room()
            peer = Peer(agent, self._renew_s, last_used=now)
            self._peers[agent] = peer
        return peer

    def _connect(self, peer: Peer, handle: CrossKVHandle) -> None:
        """Connect on first contact, and warm the connection by a small read."""
        if peer.is_connected:
            return
        self._wire.connect(peer.agent, handle.metadata)
        peer.is_connected = True
        # The first transfer sets the connection up, which takes longer than any later one.
        here, there = self._landing_address(self._pool.n_pages), handle.counter_address
        warm = partial(self._wire.read_counter, peer.agent, here, there, b"")
        self._post(warm, peer, None, lambda: None)

    def _ask(self, peer: Peer, operation: Callable[[], _T]) -> _T:
        """Run an operation of the wire; if that raises PeerLostError, the peer is lost."""
        try:
            return operation()
        except PeerLostError as error:
            now, agent = self._clock(), peer.agent
            if not peer.lost:
                logger.warning("lost encoder %s: %s", agent, error, extra=log_fields(peer=agent))
            peer.lost = True
            peer.leases.clear()
            of_late = {name: at for name, at in self._lost.items() if now - at < LOST_S}
            self._lost = {**of_late, agent: now}
            self._remove_if_lost(peer)
            raise

    def _renew(self, now: float) -> None:
        for peer in tuple(self._peers.values()):
            if peer.leases and now >= peer.next_renewal:
                peer.next_renewal = now + peer.renew_s
                for message in renewal_messages(list(peer.leases)):
                    self._notify(peer, message)
        due = (peer.next_renewal for peer in self._peers.values() if peer.leases)
        self._next_renewal = min(due, default=math.inf)

    def _release(self, peer: Peer, lease: str) -> None:
        peer.leases.pop(lease, None)
        self._notify(peer, release_message(lease))

    def _release_all(self, *, but_fetching: bool = False) -> None:
        for peer in tuple(self._peers.values()):
            for lease, fetch in tuple(peer.leases.items()):
                if fetch is None or not but_fetching:
                    self._release(peer, lease)

    def _notify(self, peer: Peer, message: bytes) -> None:
        if peer.is_connected and not peer.lost:
            with suppress(WorkerError):  # then the lease runs out by itself
                self._ask(peer, partial(self._wire.notify, peer.agent, message))

    def _make_room(self) -> None:
        """Forget an eighth of the peers at once, so that few new ones need this."""
        unused = [one for one in self._peers.values() if not (one.in_flight or one.leases)]
        unused.sort(key=lambda peer: peer.last_used)
        for peer in unused[: MAX_PEERS // 8]:
            self._remove(peer)

    def _remove_if_lost(self, peer: Peer) -> None:
        if peer.lost and peer.in_flight == 0 and self._peers.get(peer.agent) is peer:
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.agent]
        if peer.is_connected:
            self._wire.disconnect(peer.agent)
