"""What an exporter has published, under one lock: windows, the leases on them, and generations.

A window's pages belong to this table from its publication on. It has as many readers as leases, and
a lease ends once. A window that was published under a key outlives its last lease: it is kept, and
the same key opens it again, until its pages are needed; then what was released longest ago is
evicted first. A window without a key goes with its last lease. Lease ids come from the network: one
that is unknown or has ended is ignored and counted. Knows neither pool nor transport.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.common.kv.pool import Pages
from cluster.common.kv.wires.wire import COUNTER_BYTES

_ONE = np.uint64(1)


@dataclass(slots=True, eq=False)
class PublishedWindow:
    """One window's pages, in frame order; `key` is empty where nothing may find it again."""

    pages: Pages
    frames: int
    key: bytes
    readers: int = 0


@dataclass(slots=True)
class Lease:
    """The right to READ a window until `deadline`, in seconds of the table's clock.

    generation: of the window's first page.
    """

    id: str
    window: PublishedWindow
    generation: int
    deadline: float


class PublishedWindows:
    """All of one exporter. What a method hands back to be freed is its caller's from then on.

    counters: the generation of each page, in host memory also where the pool is on a GPU. Readers
        READ it. A page's counter is bumped when it is reserved, before anything is written to it,
        and again when it is freed; while a published window is kept, it stays as it is. So the
        counter of a window's first page, read after the payload, still has the handle's value only
        if no page of it changed hands in between: they are freed together. Counters start at
        random, so that another process's memory found at the same address does not pass for ours.
    n_evicted: windows whose pages were needed for others, since the start.
    n_expired: leases that ended because nobody renewed or released them.
    n_ignored: notifications about leases that are not (or no longer) known.
    """

    def __init__(
        self,
        n_pages: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s must be above 0, got {lease_s}")
        start = [randbits(62) for _ in range(n_pages)]
        self.counters: NDArray[np.uint64] = np.array(start, dtype=np.uint64)
        self.lease_s = lease_s
        self.n_evicted = self.n_expired = self.n_ignored = 0
        self._clock = clock
        self._randbits = randbits
        self._lock = threading.Lock()
        self._by_page: dict[int, PublishedWindow] = {}  # each under all of its pages
        self._by_key: dict[bytes, PublishedWindow] = {}
        self._kept: dict[bytes, PublishedWindow] = {}  # without readers, oldest release first
        self._leases: dict[str, Lease] = {}

    @property
    def n_leases(self) -> int:
        return len(self._leases)

    @property
    def n_pages(self) -> int:
        return len(self._by_page)

    @property
    def n_kept(self) -> int:
        """Windows that nobody reads."""
        return len(self._kept)

    @property
    def n_kept_pages(self) -> int:
        with self._lock:
            return sum(len(window.pages) for window in self._kept.values())

    @property
    def n_read_pages(self) -> int:
        """Pages of windows that somebody may read."""
        with self._lock:
            return sum(window.readers > 0 for window in self._by_page.values())

    def counter_address(self, page: int) -> int:
        return int(self.counters.ctypes.data) + page * COUNTER_BYTES

    def bump(self, pages: Sequence[int]) -> None:
        """Begin another generation of these pages."""
        which: slice | list[int] = list(pages)
        if pages and which == list(range(pages[0], pages[0] + len(pages))):
            which = slice(pages[0], pages[0] + len(pages))  # neighbours: several times as quick
        with self._lock:
            self.counters[which] += _ONE

    def publish(self, pages: Sequence[int], frames: int, key: bytes) -> tuple[Lease, Pages]:
        """Take over written pages: the first lease on them, and pages to be freed.

        These are what was kept under `key`. Somebody may still read what was published under it:
        that goes with its last reader.

        Raises:
            ValueError: one of them is published already.
        """
        with self._lock:
            window, freed = self._add(pages, frames, key)
            return self._lease(window), freed

    def keep(self, pages: Sequence[int], frames: int, key: bytes) -> Pages:
        """The same without a lease, for those that `open` it; the pages to be freed."""
        if not key:
            raise ValueError("a window that nobody reads or finds cannot be published")
        with self._lock:
            window, freed = self._add(pages, frames, key)
            self._kept[key] = window
            return freed

    def open(self, key: bytes) -> Lease | None:
        """One more lease on the window with this key; None where there is none."""
        with self._lock:
            window = self._by_key.get(key)
            return None if window is None else self._lease(window)

    def renew(self, ids: Iterable[str]) -> None:
        """Extend each known lease to `lease_s` from now."""
        deadline = self._clock() + self.lease_s
        with self._lock:
            for lease_id in ids:
                if lease := self._leases.get(lease_id):
                    lease.deadline = deadline
                else:
                    self.n_ignored += 1

    def extend_all(self, seconds: float) -> None:
        """No renewal could be received for so many seconds: every lease lasts that much longer."""
        with self._lock:
            for lease in self._leases.values():
                lease.deadline += seconds

    def end(self, lease_id: str) -> Pages | None:
        """End one lease: the pages to be freed, if any; None when it is not known (any more)."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                self.n_ignored += 1
                return None
            return self._end(lease)

    def expire(self) -> list[Pages]:
        """End every lease whose time is over; for each the pages to be freed, if any."""
        now = self._clock()
        with self._lock:
            over = [lease for lease in self._leases.values() if lease.deadline <= now]
            self.n_expired += len(over)
            return [self._end(lease) for lease in over]

    def end_all(self) -> list[Pages]:
        """End every lease, and keep nothing: the pages to be freed."""
        with self._lock:
            freed = [self._forget(window) for window in tuple(self._by_key.values())]
            return freed + [self._end(lease) for lease in tuple(self._leases.values())]

    def evict(self) -> Pages:
        """Give up the kept window that was released longest ago: its pages, to be freed."""
        with self._lock:
            window = next(iter(self._kept.values()), None)
            if window is None:
                return ()
            self.n_evicted += 1
            return self._forget(window)

    def check_unpublished(self, pages: Sequence[int]) -> None:
        """Raise ValueError when one of `pages` is published."""
        with self._lock:
            self._refuse_published(pages)

    def check_integrity(self, n_leases: int) -> None:
        """Raise RuntimeError unless so many leases are open and every table agrees."""
        with self._lock:
            windows = list({id(one): one for one in self._by_page.values()}.values())
            readers = sum(window.readers for window in windows)
            if not readers == len(self._leases) == n_leases:
                raise RuntimeError(
                    f"{len(self._leases)} leases are open and {readers} readers counted, "
                    f"expected {n_leases}"
                )
            for window in windows:
                if any(self._by_page.get(page) is not window for page in window.pages):
                    raise RuntimeError(f"pages {window.pages} belong to two windows")
                if bool(window.key) != (self._by_key.get(window.key) is window):
                    raise RuntimeError(f"the window in pages {window.pages} is under a wrong key")
                kept = self._kept.get(window.key) is window
                if kept != (not window.readers):
                    raise RuntimeError(
                        f"the window in pages {window.pages} is neither read nor kept"
                    )
            pages = sum(len(window.pages) for window in windows)
            if pages != len(self._by_page) or len(self._by_key) > len(windows):
                raise RuntimeError("a table has windows that are not published")

    def _add(self, pages: Sequence[int], frames: int, key: bytes) -> tuple[PublishedWindow, Pages]:
        self._refuse_published(pages)
        before = self._by_key.get(key) if key else None
        freed = () if before is None else self._forget(before)
        window = PublishedWindow(tuple(pages), frames, key)
        self._by_page.update(dict.fromkeys(window.pages, window))
        if key:
            self._by_key[key] = window
        return window, freed

    def _lease(self, window: PublishedWindow) -> Lease:
        window.readers += 1
        self._kept.pop(window.key, None)
        generation, deadline = int(self.counters[window.pages[0]]), self._clock() + self.lease_s
        lease = Lease(f"{self._randbits(128):032x}", window, generation, deadline)
        self._leases[lease.id] = lease
        return lease

    def _end(self, lease: Lease) -> Pages:
        del self._leases[lease.id]
        window = lease.window
        window.readers -= 1
        if window.readers:
            return ()
        if window.key:
            self._kept[window.key] = window
            return ()
        return self._remove(window)

    def _forget(self, window: PublishedWindow) -> Pages:
        """Take a window's key away: nobody finds it then. Its pages if nobody reads it, else ()."""
        self._by_key.pop(window.key, None)
        self._kept.pop(window.key, None)
        window.key = b""
        return () if window.readers else self._remove(window)

    def _remove(self, window: PublishedWindow) -> Pages:
        for page in window.pages:
            del self._by_page[page]
        return window.pages

    def _refuse_published(self, pages: Sequence[int]) -> None:
        if not self._by_page.keys().isdisjoint(pages):
            taken = sorted(page for page in pages if page in self._by_page)
            raise ValueError(f"pages {taken} are published")
