"""The importer's thread: posts reads on the wire, polls them, and sees each fetch to its end.

Nothing here waits for a peer, so a slow or frozen one delays nobody else. The lease of a fetch that
ends well is released by the notification of its counter's read, so never before the counter was
read; a fetch that fails releases it at once. Pages of a read that timed out stay in quarantine
until that read ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from cluster.common.errors import (
    PeerLostError,
    StaleGenerationError,
    TransferTimeoutError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.kv.handles import release_message
from cluster.common.kv.peers import HeldHandles, Peer, Peers
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import COUNTER_BYTES, FetchStats, TransferConfig, Wire, descriptors
from cluster.common.logs import log_fields
from cluster.common.messages import CrossKVHandle

logger = logging.getLogger(__name__)

POLL_S = 0.0005  # between looks at reads in flight
OVERDUE_POLL_S = 0.01  # the same when all of them are overdue
CLOSE_GRACE_S = 1.0  # how long close waits for reads in flight


@dataclass(eq=False, slots=True)
class Fetch:
    """One handle on its way into `pages`; the reader fills `posted`, by the importer's clock."""

    handle: CrossKVHandle
    pages: tuple[int, ...]
    future: Future[FetchStats]
    posted: float = 0.0


@dataclass(eq=False, slots=True)
class Read:
    """Once `overdue`, its fetch has failed and it only keeps pages quarantined.

    fetch: None for the read that warms a connection. then: what to do when it is done in time.
    """

    token: object
    peer: Peer
    deadline: float
    fetch: Fetch | None
    then: Callable[[], None]
    overdue: bool = False


class Reader:
    """Moves fetches along. All methods are called by one thread, and none waits for a peer."""

    def __init__(
        self, pool: PagePool, wire: Wire, held: HeldHandles, config: TransferConfig
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._held = held
        self._fetch_timeout_s = config.fetch_timeout_s
        self._clock = config.clock
        # Where counters land, by the first page of the fetch; the last is for warming reads.
        self._landing = np.zeros(pool.n_pages + 1, dtype=np.uint64)
        self._peers = Peers(wire, held, config)
        self._reads: list[Read] = []
        self._fetches: set[Fetch] = set()  # whose futures are not resolved yet
        self._closed = False

    def open(self) -> None:
        self._wire.open(self._pool, self._landing)

    def connect(self, handle: CrossKVHandle) -> None:
        """Make the exporter of an accepted handle a peer, and renew its lease soon."""
        if self._closed:
            return
        try:
            self._peers.renew_soon(self._peer_of(handle), handle.remaining_s)
        except WorkerError as error:  # the fetch will meet it again and report it
            fields = log_fields(handle.request_id, window=handle.window, peer=handle.agent)
            logger.warning("cannot connect to %s: %s", handle.agent, error, extra=fields)

    def start(self, fetch: Fetch) -> None:
        fetch.posted = self._clock()
        self._fetches.add(fetch)
        try:
            if self._closed:
                raise WorkerDrainingError("the KV importer is closed")
            peer = self._peer_of(fetch.handle)
            if peer.overdue:
                raise PeerLostError(f"encoder {peer.agent} does not answer")
            local = self._pool.addresses(fetch.pages)
            of_page = self._pool.filled_bytes(fetch.handle.frames)
            descs = descriptors(local, fetch.handle.addresses, of_page)
            read = partial(self._wire.read_pages, peer.agent, descs)
            self._post(read, peer, fetch, partial(self._read_counter, fetch, peer))
        except WorkerError as error:
            self._fail(fetch, error)

    def release(self, handle: CrossKVHandle) -> None:
        self._peers.release(handle)

    def step(self) -> None:
        self._poll_all()
        self._peers.renew(self._clock())

    def wait_s(self) -> float | None:
        """How long the thread may wait for a command before the next step; None: for ever."""
        if self._reads:
            return OVERDUE_POLL_S if all(read.overdue for read in self._reads) else POLL_S
        return self._peers.next_renewal_s()

    def close(self) -> None:
        """Release every lease, give reads in flight a moment, then end them with the wire."""
        self._closed = True
        try:
            for handle in self._held.let_go_of_all(but_fetching=True):
                self.release(handle)
            for _ in range(round(CLOSE_GRACE_S / POLL_S)):
                if not self._reads:
                    break
                self._poll_all()
                time.sleep(POLL_S)
            for handle in self._held.let_go_of_all():
                self.release(handle)
        finally:
            self._peers.clear()
            self._wire.close()
            for read in tuple(self._reads):  # nothing writes any more
                self._end(read)
            for fetch in tuple(self._fetches):
                self._fail(fetch, WorkerDrainingError("the KV importer was closed"))

    def _poll_all(self) -> None:
        for read in tuple(self._reads):
            self._poll(read)

    def _poll(self, read: Read) -> None:
        try:
            done = self._peers.ask(read.peer, partial(self._wire.poll, read.token))
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
        self._held.let_go(handle.lease)  # a renewal after the release would be for nothing
        here, there = self._landing_address(slot), handle.counter_address
        read = partial(self._wire.read_counter, peer.agent, here, there, message)
        try:
            self._post(read, peer, fetch, partial(self._finish, fetch))
        except WorkerError as error:
            self._fail(fetch, error)

    def _finish(self, fetch: Fetch) -> None:
        found = int(self._landing[fetch.pages[0]])
        if found != fetch.handle.generation:
            self._held.count_refusal("stale")
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
        """A read is over time. It cannot be cancelled, so its pages are not the caller's yet."""
        read.overdue = True
        read.peer.overdue += 1
        agent = read.peer.agent
        self._held.suspect(agent)
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
        """Post a read and poll it once: a short one is done when it is posted."""
        token = self._peers.ask(peer, operation)
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
            if peer.overdue == 0:
                self._held.trust(peer.agent)
            if read.fetch is not None:
                self._pool.lift(read.fetch.pages)
        self._peers.remove_if_lost(peer)

    def _fail(self, fetch: Fetch, error: WorkerError) -> None:
        if self._held.let_go(fetch.handle.lease):
            self.release(fetch.handle)
        self._fetches.discard(fetch)
        fetch.future.set_exception(error)

    def _peer_of(self, handle: CrossKVHandle) -> Peer:
        """The handle's exporter; on first contact it is connected, and warmed by a small read."""
        peer = self._peers.get(handle.agent)
        if peer is not None:
            return peer
        peer = self._peers.add(handle.agent, handle.metadata)
        # The first transfer sets the connection up, which takes longer than any later one.
        here, there = self._landing_address(self._pool.n_pages), handle.counter_address
        warm = partial(self._wire.read_counter, peer.agent, here, there, b"")
        self._post(warm, peer, None, lambda: None)
        return peer

    def _landing_address(self, slot: int) -> int:
        return int(self._landing.ctypes.data) + slot * COUNTER_BYTES
