"""What an importer's callers and its own thread both know: handles held, and peers refused.

A handle is held from `KVImporter.accept` until it is fetched or dropped. A peer that was lost is
refused for a while, and one that is suspect (a READ from it is overdue) until that READ ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from cluster.errors import KVLostError, PeerLostError
from cluster.messages import CrossKVHandle

LOST_S = 10.0  # how long a lost peer is refused before a new handle may connect to it again


class HeldHandles:
    """The handles that one importer holds, by lease. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, CrossKVHandle] = {}  # by lease
        self._by_agent: dict[str, dict[str, None]] = {}  # leases, for those that have any
        self._fetching: set[str] = set()  # leases, a subset of those held
        self._lost: dict[str, float] = {}  # by agent, when it was lost
        self._suspect: set[str] = set()  # agents
        self._refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: CrossKVHandle) -> None:
        """Hold `handle`; harmless when it is held already.

        Raises:
            PeerLostError: its exporter was just lost, or is suspect.
        """
        with self._lock:
            self._refuse_peer(handle.agent)
            if handle.lease not in self._held:
                self._held[handle.lease] = handle
                self._by_agent.setdefault(handle.agent, {})[handle.lease] = None

    def begin_fetch(self, handle: CrossKVHandle) -> None:
        """Mark a held handle as being fetched.

        Raises:
            PeerLostError: its exporter was lost since it was accepted, or is suspect.
            KVLostError: it is not held, or is being fetched already.
        """
        with self._lock:
            self._refuse_peer(handle.agent)
            if handle.lease not in self._held:
                raise KVLostError("the KV handle was not accepted, or was fetched or dropped")
            if handle.lease in self._fetching:
                raise KVLostError("the KV handle is being fetched already")
            self._fetching.add(handle.lease)

    def let_go(self, lease: str) -> bool:
        """Stop holding a lease; False when it was not held."""
        with self._lock:
            return self._let_go(lease) is not None

    def let_go_of_waiting(self) -> list[CrossKVHandle]:
        """Stop holding every handle that is not being fetched, and return them."""
        with self._lock:
            waiting = [lease for lease in self._held if lease not in self._fetching]
            return [handle for lease in waiting if (handle := self._let_go(lease))]

    def let_go_of_all(self) -> list[CrossKVHandle]:
        """Stop holding every handle, and return them."""
        with self._lock:
            return [handle for lease in tuple(self._held) if (handle := self._let_go(lease))]

    def leases_of(self, agent: str) -> list[str]:
        """All leases held of one exporter."""
        with self._lock:
            return list(self._by_agent.get(agent, ()))

    def agents(self) -> set[str]:
        """The exporters of all handles held."""
        with self._lock:
            return set(self._by_agent)

    def lose(self, agent: str) -> None:
        """Remember that a peer was lost, and let go of every handle of it."""
        now = self._clock()
        with self._lock:
            self._lost = {name: at for name, at in self._lost.items() if now - at < LOST_S}
            self._lost[agent] = now
            for lease in tuple(self._by_agent.get(agent, ())):
                self._let_go(lease)

    def refuse_lost(self, agent: str) -> None:
        """Raise PeerLostError when `agent` was lost less than LOST_S ago."""
        with self._lock:
            self._refuse_lost(agent)

    def suspect(self, agent: str) -> None:
        with self._lock:
            self._suspect.add(agent)

    def trust(self, agent: str) -> None:
        """End the suspicion."""
        with self._lock:
            self._suspect.discard(agent)

    def count_refusal(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def refused(self) -> Mapping[str, int]:
        """Refusals so far, by reason: a copy."""
        with self._lock:
            return dict(self._refused)

    def _let_go(self, lease: str) -> CrossKVHandle | None:
        self._fetching.discard(lease)
        handle = self._held.pop(lease, None)
        if handle is not None:
            leases = self._by_agent[handle.agent]
            del leases[lease]
            if not leases:
                del self._by_agent[handle.agent]
        return handle

    def _refuse_peer(self, agent: str) -> None:
        self._refuse_lost(agent)
        if agent in self._suspect:
            raise PeerLostError(f"encoder {agent} does not answer: an earlier READ is overdue")

    def _refuse_lost(self, agent: str) -> None:
        lost_at = self._lost.get(agent)
        if lost_at is not None and self._clock() - lost_at < LOST_S:
            raise PeerLostError(f"encoder {agent} is gone")
