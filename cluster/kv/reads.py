"""The importer's records: handles held, fetches, reads in flight, and the peers they read from.

`Ledger` is what callers' threads and the importer's thread share; everything else belongs to the
importer's thread. `cluster.kv.reader` moves them along.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from cluster.errors import KVLostError, PeerLostError
from cluster.kv.transfer import FetchStats
from cluster.messages import CrossKVHandle

LOST_S = 10.0  # how long a lost peer is refused before a new handle may connect to it again


@dataclass(eq=False, slots=True)
class Fetch:
    """One handle on its way into `pages`: its payload is read first, then its counter.

    posted: monotonic time; filled by the reader when it posts the payload's read.
    """

    handle: CrossKVHandle
    pages: tuple[int, ...]
    future: Future[FetchStats]
    posted: float = 0.0


@dataclass(eq=False, slots=True)
class Peer:
    """An exporter that this importer is connected to. All times are monotonic.

    overdue: how many of its reads in flight timed out; above 0 the peer is suspect.
    lost: an operation on it failed; it is removed once nothing of it is in flight.
    """

    agent: str
    next_renewal: float
    last_used: float
    in_flight: int = 0
    overdue: int = 0
    lost: bool = False


@dataclass(eq=False, slots=True)
class Read:
    """A posted read. Once `overdue`, its fetch has failed and it only keeps pages quarantined.

    fetch: None for the read that warms a connection.
    """

    token: object
    peer: Peer
    deadline: float  # monotonic
    phase: Literal["warm", "payload", "counter"]
    fetch: Fetch | None
    overdue: bool = False


class Ledger:
    """Which handles are held, and which peers are lost or suspect. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, CrossKVHandle] = {}  # by lease
        self._fetching: set[str] = set()  # leases, a subset of those held
        self._lost: dict[str, float] = {}  # by agent, monotonic time of the loss
        self._suspect: set[str] = set()  # agents

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: CrossKVHandle) -> None:
        """Hold `handle`; harmless when it is held already.

        Raises:
            PeerLostError: its exporter was just lost, or is suspect.
        """
        self.refuse_lost(handle.agent)
        with self._lock:
            self._refuse_suspect(handle.agent)
            self._held.setdefault(handle.lease, handle)

    def begin_fetch(self, handle: CrossKVHandle) -> None:
        """Mark a held handle as being fetched.

        Raises:
            PeerLostError: its exporter was lost since it was accepted, or is suspect.
            KVLostError: it is not held, or is being fetched already.
        """
        self.refuse_lost(handle.agent)
        with self._lock:
            self._refuse_suspect(handle.agent)
            if handle.lease not in self._held:
                raise KVLostError("the KV handle was not accepted, or was fetched or dropped")
            if handle.lease in self._fetching:
                raise KVLostError("the KV handle is being fetched already")
            self._fetching.add(handle.lease)

    def refuse_lost(self, agent: str) -> None:
        """Raise PeerLostError when `agent` was lost less than LOST_S ago."""
        with self._lock:
            lost_at = self._lost.get(agent)
        if lost_at is not None and self._clock() - lost_at < LOST_S:
            raise PeerLostError(f"encoder {agent} is gone")

    def let_go(self, lease: str) -> bool:
        """Stop holding a lease; False when it was not held."""
        with self._lock:
            self._fetching.discard(lease)
            return self._held.pop(lease, None) is not None

    def leases_of(self, agent: str, waiting_only: bool = False) -> list[str]:
        """Leases held of one exporter; only those that nothing fetches yet, if asked so."""
        with self._lock:
            skipped = self._fetching if waiting_only else frozenset[str]()
            return [
                lease
                for lease, handle in self._held.items()
                if handle.agent == agent and lease not in skipped
            ]

    def agents(self) -> set[str]:
        """Exporters of all handles held."""
        with self._lock:
            return {held.agent for held in self._held.values()}

    def lose(self, agent: str) -> None:
        """Remember that a peer was lost, and let go of every handle of it."""
        now = self._clock()
        with self._lock:
            self._lost = {name: at for name, at in self._lost.items() if now - at < LOST_S}
            self._lost[agent] = now
            for lease in [le for le, held in self._held.items() if held.agent == agent]:
                del self._held[lease]
                self._fetching.discard(lease)

    def suspect(self, agent: str, suspected: bool) -> None:
        with self._lock:
            if suspected:
                self._suspect.add(agent)
            else:
                self._suspect.discard(agent)

    def _refuse_suspect(self, agent: str) -> None:
        if agent in self._suspect:
            raise PeerLostError(f"encoder {agent} does not answer: an earlier READ is overdue")
