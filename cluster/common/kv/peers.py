"""What an importer knows of exporters: the handles of theirs that it holds, and its connections.

A handle is held from `KVImporter.accept` until it is fetched or dropped; leases are renewed per
peer, many to a notification. A peer is added on first contact, warmed, and kept. It is lost when an
operation on it raises PeerLostError, refused for a while, and removed once nothing of it is in
flight; one from which a READ is overdue is refused until that READ ends. What is done often looks
at peers of which something is held, never at all: a decoder may know thousands.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from cluster.common.errors import KVLostError, PeerLostError, WorkerError
from cluster.common.kv.handles import release_message, renewal_messages
from cluster.common.kv.wire import TransferConfig, Wire
from cluster.common.logs import log_fields
from cluster.common.messages import CrossKVHandle

logger = logging.getLogger(__name__)

# After a handle is accepted. It may have waited in a router for nearly as long as its lease lasts,
# and nothing tells for how long. One that is fetched earlier than this needs no renewal.
FIRST_RENEWAL_S = 0.2
RENEWALS_PER_LEASE = 3  # at least: an exporter of another version may lease for less time
LOST_S = 10.0  # how long a lost peer is refused before a new handle may connect to it again
MAX_PEERS = 512  # above it the one that was not read from for longest is forgotten for a new one

_T = TypeVar("_T")


class HeldHandles:
    """The handles that one importer holds, by lease. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._held: dict[str, CrossKVHandle] = {}  # by lease
        self._by_agent: dict[str, dict[str, None]] = {}  # leases, for those that have any
        self._fetching: set[str] = set()  # leases, a subset of those held
        self._lost: dict[str, float] = {}  # by agent, when it was lost
        self._suspect: set[str] = set()  # agents
        self._refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: CrossKVHandle) -> None:
        """Raises PeerLostError when its exporter was just lost, or is suspect."""
        with self._lock:
            self._refuse_suspect(handle.agent)
            if handle.lease not in self._held:
                self._held[handle.lease] = handle
                self._by_agent.setdefault(handle.agent, {})[handle.lease] = None

    def begin_fetch(self, handle: CrossKVHandle) -> None:
        """Raise as `hold`, or KVLostError where it is not held, or is being fetched already."""
        with self._lock:
            self._refuse_suspect(handle.agent)
            if handle.lease not in self._held:
                raise KVLostError("the KV handle was not accepted, or was fetched or dropped")
            if handle.lease in self._fetching:
                raise KVLostError("the KV handle is being fetched already")
            self._fetching.add(handle.lease)

    def let_go(self, lease: str) -> bool:
        """Stop holding a lease; False when it was not held."""
        with self._lock:
            self._fetching.discard(lease)
            handle = self._held.pop(lease, None)
            if handle is None:
                return False
            leases = self._by_agent[handle.agent]
            del leases[lease]
            if not leases:
                del self._by_agent[handle.agent]
            return True

    def let_go_of_all(self, *, but_fetching: bool = False) -> list[CrossKVHandle]:
        with self._lock:
            kept = self._fetching if but_fetching else ()
            handles = [handle for lease, handle in self._held.items() if lease not in kept]
            for handle in handles:
                self.let_go(handle.lease)
            return handles

    def leases_of(self, agent: str) -> list[str]:
        with self._lock:
            return list(self._by_agent.get(agent, ()))

    def agents(self) -> set[str]:
        with self._lock:
            return set(self._by_agent)

    def lose(self, agent: str) -> None:
        now = self._clock()
        with self._lock:
            self._lost = {name: at for name, at in self._lost.items() if now - at < LOST_S}
            self._lost[agent] = now
            for lease in self.leases_of(agent):
                self.let_go(lease)

    def refuse_lost(self, agent: str) -> None:
        with self._lock:
            lost_at = self._lost.get(agent)
        if lost_at is not None and self._clock() - lost_at < LOST_S:
            raise PeerLostError(f"encoder {agent} is gone")

    def suspect(self, agent: str) -> None:
        with self._lock:
            self._suspect.add(agent)

    def trust(self, agent: str) -> None:
        with self._lock:
            self._suspect.discard(agent)

    def count_refusal(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def refused(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._refused)

    def _refuse_suspect(self, agent: str) -> None:
        self.refuse_lost(agent)
        if agent in self._suspect:
            raise PeerLostError(f"encoder {agent} does not answer: an earlier READ is overdue")


@dataclass(eq=False, slots=True)
class Peer:
    """An exporter that this importer is connected to. All times are of the importer's clock.

    renew_s: between two renewals. overdue: reads in flight that timed out; above 0 it is suspect.
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
    """Connections of one wire, by agent name. Used by the importer's thread only."""

    def __init__(self, wire: Wire, held: HeldHandles, config: TransferConfig) -> None:
        self._wire = wire
        self._held = held
        self._renew_s = config.renew_s
        self._clock = config.clock
        self._peers: dict[str, Peer] = {}
        self._next_renewal = math.inf  # the earliest of any peer; none is due before

    def get(self, agent: str) -> Peer | None:
        """The peer, or None on first contact; PeerLostError when it is lost."""
        self._held.refuse_lost(agent)
        peer = self._peers.get(agent)
        if peer is not None and peer.lost:
            raise PeerLostError(f"encoder {agent} is gone")
        return peer

    def add(self, agent: str, metadata: bytes) -> Peer:
        now = self._clock()
        if len(self._peers) >= MAX_PEERS:
            self._make_room()
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
        if peer := self._peers.get(handle.agent):
            self._notify(peer, release_message(handle.lease))

    def renew_soon(self, peer: Peer, lease_s: float) -> None:
        """Renew soon what was just accepted; `lease_s` of its exporter may be shorter than ours."""
        peer.renew_s = min(peer.renew_s, max(FIRST_RENEWAL_S, lease_s / RENEWALS_PER_LEASE))
        peer.next_renewal = min(peer.next_renewal, self._clock() + FIRST_RENEWAL_S)
        self._next_renewal = min(self._next_renewal, peer.next_renewal)

    def renew(self, now: float) -> None:
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

    def _make_room(self) -> None:
        """Forget an eighth at once, so that not each new peer looks at all."""
        agents = self._held.agents()
        unused = [
            peer
            for peer in self._peers.values()
            if peer.in_flight == 0 and peer.agent not in agents
        ]
        unused.sort(key=lambda peer: peer.last_used)
        for peer in unused[: MAX_PEERS // 8]:
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.agent]
        self._wire.disconnect(peer.agent)
