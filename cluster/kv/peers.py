"""The exporters that an importer is connected to: added on first contact, warmed, kept.

A peer is lost when an operation on it raises PeerLostError, and removed once nothing of it is in
flight. Leases of all handles held are renewed per peer, many to a notification. What is done often
looks at peers of which something is held, never at all of them: a decoder may know thousands. Used
by the importer's thread only; knows nothing of pages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from cluster.errors import PeerLostError, WorkerError
from cluster.kv.held_handles import HeldHandles
from cluster.kv.notifications import release_message, renewal_messages
from cluster.kv.transfer_config import TransferConfig
from cluster.kv.wires.wire import Wire
from cluster.logs import log_fields
from cluster.messages import CrossKVHandle

logger = logging.getLogger(__name__)

# After a handle is accepted. It may have waited in a router for nearly as long as its lease lasts,
# and nothing tells for how long. One that is fetched earlier than this needs no renewal.
FIRST_RENEWAL_S = 0.2
RENEWALS_PER_LEASE = 3  # at least: an exporter of another version may lease for less time
IDLE_PEER_S = 600.0  # a peer that was not read from for so long is forgotten
FORGET_S = IDLE_PEER_S / 10  # between two looks for such peers
MAX_PEERS = 512  # above it the one that was not read from for longest is forgotten for a new one

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Peer:
    """An exporter that this importer is connected to. All times are of the importer's clock.

    renew_s: between two renewals of its leases.
    overdue: how many of its reads in flight timed out; above 0 the peer is suspect.
    lost: an operation on it failed; it is removed once nothing of it is in flight.
    """

    agent: str
    renew_s: float
    next_renewal: float
    last_used: float
    in_flight: int = 0
    overdue: int = 0
    lost: bool = False


class Peers:
    """Connections of one wire, by agent name."""

    def __init__(self, wire: Wire, held: HeldHandles, config: TransferConfig) -> None:
        self._wire = wire
        self._held = held
        self._renew_s = config.renew_s
        self._clock = config.clock
        self._peers: dict[str, Peer] = {}
        self._next_renewal = math.inf  # the earliest of any peer; none is due before
        self._next_forgetting = -math.inf

    def get(self, agent: str) -> Peer | None:
        """The peer, or None on first contact; PeerLostError when it is lost."""
        self._held.refuse_lost(agent)
        peer = self._peers.get(agent)
        if peer is not None and peer.lost:
            raise PeerLostError(f"encoder {agent} is gone")
        return peer

    def add(self, agent: str, metadata: bytes) -> Peer:
        now = self._clock()
        self._make_room(now)
        self._wire.connect(agent, metadata)
        peer = Peer(agent, self._renew_s, next_renewal=now + self._renew_s, last_used=now)
        self._peers[agent] = peer
        self._next_renewal = min(self._next_renewal, peer.next_renewal)
        return peer

    def ask(self, peer: Peer, operation: Callable[[], _T]) -> _T:
        """Run an operation of the wire on `peer`, which is lost when it raises PeerLostError."""
        try:
            return operation()
        except PeerLostError as error:
            if not peer.lost:
                logger.warning(
                    "lost encoder %s: %s", peer.agent, error, extra=log_fields(peer=peer.agent)
                )
            peer.lost = True
            self._held.lose(peer.agent)
            self.remove_if_lost(peer)
            raise

    def remove_if_lost(self, peer: Peer) -> None:
        if peer.lost and peer.in_flight == 0 and self._peers.get(peer.agent) is peer:
            self._remove(peer)

    def release(self, handle: CrossKVHandle) -> None:
        """Tell the exporter that a handle is not wanted any more, if it can be told."""
        if peer := self._peers.get(handle.agent):
            self._notify(peer, release_message(handle.lease))

    def renew_soon(self, peer: Peer, lease_s: float) -> None:
        """Bring the next renewal forward, for a handle of this peer that was just accepted.

        lease_s: how long its exporter leases for; for a shorter time all renewals are closer.
        """
        peer.renew_s = min(peer.renew_s, max(FIRST_RENEWAL_S, lease_s / RENEWALS_PER_LEASE))
        peer.next_renewal = min(peer.next_renewal, self._clock() + FIRST_RENEWAL_S)
        self._next_renewal = min(self._next_renewal, peer.next_renewal)

    def renew(self, now: float) -> None:
        """Renew the leases of each peer whose renewal is due."""
        if now < self._next_renewal:
            return
        for peer in self._with_handles():
            if now >= peer.next_renewal:
                peer.next_renewal = now + peer.renew_s
                for message in renewal_messages(self._held.leases_of(peer.agent)):
                    self._notify(peer, message)
        self._next_renewal = self._first_due()

    def next_renewal_s(self) -> float | None:
        """Seconds until a renewal is due; None when nothing is held."""
        due = self._first_due()
        self._next_renewal = min(self._next_renewal, due)
        return max(0.0, due - self._clock()) if due < math.inf else None

    def clear(self) -> None:
        """Forget all, before the wire is closed."""
        self._peers.clear()

    def _notify(self, peer: Peer, message: bytes) -> None:
        if not peer.lost:
            with suppress(WorkerError):  # then the lease runs out by itself
                self.ask(peer, lambda: self._wire.notify(peer.agent, message))

    def _with_handles(self) -> list[Peer]:
        """The peers of which something is held; they are no more than the handles."""
        return [peer for agent in self._held.agents() if (peer := self._peers.get(agent))]

    def _first_due(self) -> float:
        return min((peer.next_renewal for peer in self._with_handles()), default=math.inf)

    def _make_room(self, now: float) -> None:
        """Forget who was idle for long; and of too many, those that were idle for longest."""
        is_full = len(self._peers) >= MAX_PEERS
        if now < self._next_forgetting and not is_full:
            return
        self._next_forgetting = now + FORGET_S
        agents = self._held.agents()
        unused = [
            peer
            for peer in self._peers.values()
            if peer.in_flight == 0 and peer.agent not in agents
        ]
        unused.sort(key=lambda peer: peer.last_used)
        # An eighth at once, so that not each new peer looks at all.
        room_for = MAX_PEERS // 8 if is_full else 0
        for place, peer in enumerate(unused):
            if place < room_for or now - peer.last_used > IDLE_PEER_S:
                self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.agent]
        self._wire.disconnect(peer.agent)
