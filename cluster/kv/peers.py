"""The exporters that an importer is connected to: added on first contact, warmed, kept.

A peer is lost when an operation on it raises PeerLostError, and removed once nothing of it is in
flight. Leases of all handles held are renewed per peer, many to a notification. Belongs to the
importer's thread; knows nothing of pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cluster.errors import PeerLostError, WorkerError
from cluster.kv.reads import Ledger, Peer
from cluster.kv.wire import Wire, release_message, renewal_messages
from cluster.logs import told

logger = logging.getLogger(__name__)

IDLE_PEER_S = 600.0  # a peer that was not read from for so long is forgotten

_T = TypeVar("_T")


class Peers:
    """Connections of one wire, by agent name."""

    def __init__(self, wire: Wire, ledger: Ledger, renew_s: float) -> None:
        self._wire = wire
        self._ledger = ledger
        self._renew_s = renew_s
        self._peers: dict[str, Peer] = {}

    def get(self, agent: str) -> Peer | None:
        """The peer, or None on first contact; PeerLostError when it is lost."""
        self._ledger.refuse_lost(agent)
        peer = self._peers.get(agent)
        if peer is not None and peer.lost:
            raise PeerLostError(f"encoder {agent} is gone")
        return peer

    def add(self, agent: str, metadata: bytes) -> Peer:
        now = time.monotonic()
        self._forget_idle(now)
        self._wire.connect(agent, metadata)
        peer = Peer(agent, next_renewal=now + self._renew_s, last_used=now)
        self._peers[agent] = peer
        return peer

    def ask(self, peer: Peer, operation: Callable[[], _T]) -> _T:
        """Run an operation of the wire on `peer`, which is lost when it raises PeerLostError."""
        try:
            return operation()
        except PeerLostError as error:
            if not peer.lost:
                logger.warning(
                    "lost encoder %s: %s", peer.agent, error, extra=told(peer=peer.agent)
                )
            peer.lost = True
            self._ledger.lose(peer.agent)
            self.remove_if_lost(peer)
            raise

    def remove_if_lost(self, peer: Peer) -> None:
        if peer.lost and peer.in_flight == 0 and self._peers.get(peer.agent) is peer:
            self._remove(peer)

    def release(self, agent: str, lease: str) -> None:
        """Tell the exporter that a lease is not wanted any more, if it can be told."""
        if peer := self._peers.get(agent):
            self._notify(peer, release_message(lease))

    def release_all(self, waiting_only: bool) -> None:
        """Let go of every handle held; only of those that nothing fetches yet, if asked so."""
        for peer in tuple(self._peers.values()):
            for lease in self._ledger.leases_of(peer.agent, waiting_only):
                self._ledger.let_go(lease)
                self._notify(peer, release_message(lease))

    def renew(self, now: float) -> None:
        """Renew the leases of each peer whose renewal is due."""
        for peer in tuple(self._peers.values()):
            if now >= peer.next_renewal:
                peer.next_renewal = now + self._renew_s
                for message in renewal_messages(self._ledger.leases_of(peer.agent)):
                    self._notify(peer, message)

    def next_renewal_s(self) -> float | None:
        """Seconds until a renewal is due; None when nothing is held."""
        agents = self._ledger.agents()
        due = [peer.next_renewal for peer in self._peers.values() if peer.agent in agents]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def clear(self) -> None:
        """Forget all, before the wire is closed."""
        self._peers.clear()

    def _notify(self, peer: Peer, message: bytes) -> None:
        if not peer.lost:
            with suppress(WorkerError):  # then the lease runs out by itself
                self.ask(peer, lambda: self._wire.notify(peer.agent, message))

    def _forget_idle(self, now: float) -> None:
        agents = self._ledger.agents()
        for peer in tuple(self._peers.values()):
            idle = now - peer.last_used > IDLE_PEER_S
            if idle and peer.in_flight == 0 and peer.agent not in agents:
                self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.agent]
        self._wire.disconnect(peer.agent)
