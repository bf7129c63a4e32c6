"""Leases on published pages: which lease holds which pages of an exporter, and until when.

Deadlines are of the local clock. Lease ids come from the network: one that is unknown or already
ended is ignored and counted. Knows neither the pool nor the transport. Thread-safe.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """Pages that a reader may READ until `deadline`, in seconds of the table's clock."""

    id: str
    pages: tuple[int, ...]
    deadline: float


class LeaseTable:
    """Open leases. A lease ends once: `end` and `expire` hand its pages to exactly one caller."""

    def __init__(
        self,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s must be above 0, got {lease_s}")
        self.lease_s = lease_s
        self._clock = clock
        self._randbits = randbits
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self.n_ignored = 0  # notifications about leases that are not (or no longer) known
        self.n_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, pages: Sequence[int]) -> Lease:
        """Lease `pages` for `lease_s` seconds from now; several leases may be of the same pages."""
        lease_id = f"{self._randbits(128):032x}"
        lease = Lease(lease_id, tuple(pages), self._clock() + self.lease_s)
        with self._lock:
            self._leases[lease.id] = lease
        return lease

    def renew(self, ids: Iterable[str]) -> None:
        """Extend each known lease to `lease_s` from now; ignore and count the others."""
        deadline = self._clock() + self.lease_s
        with self._lock:
            for lease_id in ids:
                lease = self._leases.get(lease_id)
                if lease is None:
                    self.n_ignored += 1
                else:
                    lease.deadline = deadline

    def extend_all(self, seconds: float) -> None:
        """No renewal could be received for so many seconds: every lease lasts that much longer."""
        with self._lock:
            for lease in self._leases.values():
                lease.deadline += seconds

    def end(self, lease_id: str) -> tuple[int, ...] | None:
        """End one lease: its pages, or None (counted) when it is unknown or has ended."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                self.n_ignored += 1
                return None
            return lease.pages

    def expire(self) -> list[tuple[int, ...]]:
        """End every lease whose time is over; the pages of each."""
        now = self._clock()
        with self._lock:
            over = [lease for lease in self._leases.values() if lease.deadline <= now]
            self.n_expired += len(over)
            return self._pop(over)

    def end_all(self) -> list[tuple[int, ...]]:
        """End every lease; the pages of each."""
        with self._lock:
            return self._pop(list(self._leases.values()))

    def _pop(self, leases: list[Lease]) -> list[tuple[int, ...]]:
        for lease in leases:
            del self._leases[lease.id]
        return [lease.pages for lease in leases]
