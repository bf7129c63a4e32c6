"""The importer's thread: posts reads on the wire, polls them, and sees each fetch to its end.

Everything here runs on the one thread that owns the wire, and nothing waits for a peer, so a slow
or frozen one holds up nobody else. What it keeps to: a lease is released by the notification of
its counter's read, so never before the counter was read; pages of a read that timed out stay in
quarantine until that read ends.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import numpy as np

from cluster.errors import (
    PeerLostError,
    StaleGenerationError,
    TransferTimeoutError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.kv.leases import COUNTER_BYTES
from cluster.kv.peers import Peers
from cluster.kv.pool import PagePool
from cluster.kv.reads import Fetch, Ledger, Peer, Read
from cluster.kv.tally import Tally
from cluster.kv.transfer import FetchStats
from cluster.kv.wire import Wire, read_message, spans
from cluster.logs import told
from cluster.messages import CrossKVHandle

logger = logging.getLogger(__name__)

POLL_S = 0.0005  # between looks at reads in flight
OVERDUE_POLL_S = 0.01  # the same when all of them are overdue
CLOSE_GRACE_S = 1.0  # how long close waits for reads in flight


class Reader:
    """Moves fetches along. Its methods are called by one thread; none waits for a peer."""

    def __init__(
        self,
        pool: PagePool,
        wire: Wire,
        ledger: Ledger,
        refused: Tally,
        *,
        fetch_timeout_s: float,
        renew_s: float,
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._ledger = ledger
        self._refused = refused
        self._fetch_timeout_s = fetch_timeout_s
        # Where counters land, by the first page of the fetch; the last is for warming reads.
        self._landing = np.zeros(pool.n_pages + 1, dtype=np.uint64)
        self._peers = Peers(wire, ledger, renew_s)
        self.projection_s = 0.0  # set by any thread; see `ReadReport`
        self._reads: list[Read] = []
        self._fetches: set[Fetch] = set()  # whose futures are not resolved yet
        self._closed = False

    def open(self) -> None:
        self._wire.open(self._pool, self._landing)

    def connect(self, handle: CrossKVHandle) -> None:
        """Make the exporter of an accepted handle a peer, ahead of the fetch."""
        if self._closed:
            return
        try:
            self._peer_of(handle)
        except WorkerError as error:  # the fetch will meet it again and report it
            logger.warning(
                "cannot connect to %s: %s",
                handle.agent,
                error,
                extra=told(handle.request_id, window=handle.window, peer=handle.agent),
            )

    def start(self, fetch: Fetch) -> None:
        """Post the payload's read."""
        fetch.posted = time.monotonic()
        self._fetches.add(fetch)
        try:
            if self._closed:
                raise WorkerDrainingError("the KV importer is closed")
            peer = self._peer_of(fetch.handle)
            if peer.overdue:
                raise PeerLostError(f"encoder {peer.agent} does not answer")
            local = [self._pool.address(page) for page in fetch.pages]
            payload = spans(local, fetch.handle.addresses, self._pool.page_bytes)
            token = self._peers.ask(peer, partial(self._wire.read_pages, peer.agent, payload))
        except WorkerError as error:
            self._fail(fetch, error)
        else:
            self._track(Read(token, peer, self._deadline(fetch), "payload", fetch))

    def release(self, handle: CrossKVHandle) -> None:
        """Tell the exporter that a handle is not wanted any more."""
        self._peers.release(handle.agent, handle.lease)

    def step(self) -> None:
        """Poll what is in flight, and renew what is due."""
        now = time.monotonic()
        for read in tuple(self._reads):
            self._poll(read, now)
        self._peers.renew(now)

    def wait_s(self) -> float | None:
        """How long the thread may wait for a command before the next step; None: for ever."""
        if self._reads:
            return OVERDUE_POLL_S if all(read.overdue for read in self._reads) else POLL_S
        return self._peers.next_renewal_s()

    def close(self) -> None:
        """Release every lease, give reads in flight a moment, then end them with the wire."""
        self._closed = True
        try:
            self._peers.release_all(waiting_only=True)
            deadline = time.monotonic() + CLOSE_GRACE_S
            while self._reads and time.monotonic() < deadline:
                for read in tuple(self._reads):
                    self._poll(read, time.monotonic())
                time.sleep(POLL_S)
            self._peers.release_all(waiting_only=False)
        finally:
            self._peers.clear()
            self._wire.close()
            for read in tuple(self._reads):  # nothing writes any more
                self._end(read)
            for fetch in tuple(self._fetches):
                self._fail(fetch, WorkerDrainingError("the KV importer was closed"))

    def _poll(self, read: Read, now: float) -> None:
        try:
            done = self._peers.ask(read.peer, partial(self._wire.poll, read.token))
        except WorkerError as error:
            self._end(read)
            if read.fetch is not None and not read.overdue:
                self._fail(read.fetch, error)
            return
        if done:
            self._end(read)
            self._advance(read)
        elif now >= read.deadline and not read.overdue:
            self._give_up(read)

    def _advance(self, read: Read) -> None:
        """Go on after a read that is done: payload, then counter, then the verdict."""
        fetch = read.fetch
        if fetch is None or read.overdue:
            return
        if read.phase == "payload":
            self._read_counter(fetch, read.peer)
        else:
            self._finish(fetch)

    def _read_counter(self, fetch: Fetch, peer: Peer) -> None:
        handle, slot = fetch.handle, fetch.pages[0]
        self._landing[slot] = handle.generation ^ 0xFFFF  # anything but what is expected
        read_s = time.monotonic() - fetch.posted
        message = read_message(handle.lease, read_s, self.projection_s)
        self._ledger.let_go(handle.lease)  # a renewal after the release would be for nothing
        here, there = self._landing_address(slot), handle.counter_address
        post = partial(self._wire.read_counter, peer.agent, here, there, message)
        try:
            token = self._peers.ask(peer, post)
        except WorkerError as error:
            self._fail(fetch, error)
        else:
            self._track(Read(token, peer, self._deadline(fetch), "counter", fetch))

    def _finish(self, fetch: Fetch) -> None:
        found = int(self._landing[fetch.pages[0]])
        if found != fetch.handle.generation:
            self._refused.add("stale")
            self._fail(
                fetch,
                StaleGenerationError(
                    f"the KV of window {fetch.handle.window} was reused before it was read: "
                    f"generation {found}, expected {fetch.handle.generation}"
                ),
            )
            return
        n_bytes = len(fetch.pages) * self._pool.page_bytes
        seconds = time.monotonic() - fetch.posted
        self._fetches.discard(fetch)
        fetch.future.set_result(FetchStats(n_bytes, seconds, self._wire.transport))

    def _give_up(self, read: Read) -> None:
        """A read is over time. It cannot be cancelled, so its pages are not the caller's yet."""
        read.overdue = True
        read.peer.overdue += 1
        self._ledger.suspect(read.peer.agent, True)
        peer = read.peer.agent
        logger.warning(
            "a READ from %s is overdue: the peer is suspect", peer, extra=told(peer=peer)
        )
        if read.fetch is not None:
            self._pool.quarantine(read.fetch.pages)
            self._fail(
                read.fetch,
                TransferTimeoutError(
                    f"reading window {read.fetch.handle.window} from {read.peer.agent} took "
                    f"more than {self._fetch_timeout_s:g} s"
                ),
            )

    def _track(self, read: Read) -> None:
        read.peer.in_flight += 1
        read.peer.last_used = time.monotonic()
        self._reads.append(read)
        self._poll(read, read.peer.last_used)  # short reads are done when they are posted

    def _end(self, read: Read) -> None:
        """Nothing of `read` is in flight any more."""
        peer = read.peer
        self._reads.remove(read)
        peer.in_flight -= 1
        if read.overdue:
            peer.overdue -= 1
            if peer.overdue == 0:
                self._ledger.suspect(peer.agent, False)
            if read.fetch is not None:
                self._pool.lift(read.fetch.pages)
        self._peers.remove_if_lost(peer)

    def _fail(self, fetch: Fetch, error: WorkerError) -> None:
        if self._ledger.let_go(fetch.handle.lease):
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
        token = self._peers.ask(peer, warm)
        deadline = time.monotonic() + self._fetch_timeout_s
        self._track(Read(token, peer, deadline, "warm", None))
        return peer

    def _deadline(self, fetch: Fetch) -> float:
        return fetch.posted + self._fetch_timeout_s

    def _landing_address(self, slot: int) -> int:
        return int(self._landing.ctypes.data) + slot * COUNTER_BYTES
