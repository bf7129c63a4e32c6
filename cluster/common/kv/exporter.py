"""The encoder's end of a transfer: reserves, publishes, leases and frees pages.

The pool's lock guards all tables. A page's counter, its generation, is incremented when the page is
reserved and when it is freed. If the counter of a window's first page, read after the payload,
still has the handle's value, then no page of the window changed hands in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cluster.common.errors import WorkerDrainingError
from cluster.common.kv.handles import parse_notification, sign
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool, Pages
from cluster.common.kv.wire import COUNTER_BYTES, MakeThread, TransferConfig, Wire, WireThread
from cluster.common.messages import CrossKVHandle

POLL_S = 0.005  # between two looks for notifications while a lease is open
IDLE_POLL_S = 0.9  # and while none is; a lease that opens ends the wait
STALL_S = 1.0  # a longer time between two looks means that the process was held up


@dataclass(slots=True, eq=False)
class _Window:
    pages: Pages
    frames: int
    key: bytes  # empty: `publish_again` cannot find it
    readers: int = 0


@dataclass(slots=True)
class _Lease:
    """The right to READ a window."""

    id: str
    window: _Window
    generation: int
    deadline: float  # in seconds of the exporter's clock


class KVExporter:
    """Owns a pool, publishes filled pages under leases, and frees them on release.

    Pages are reserved, written, published and then leased until the reader's release, the lease's
    expiry or `revoke`. Without a key they are free then; with one they are kept, and
    `publish_again` leases them again, until `reserve` evicts them. Any thread may call any method;
    none waits for a transfer.
    """

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        config: TransferConfig,
        wire: Wire,
        make_thread: MakeThread = WireThread,
    ) -> None:
        """Open `wire` and own it from now on. Raises ConfigurationError.

        make_thread: where it makes no thread, its maker calls `handle_notifications` and `expire`.
        """
        self.layout = layout
        self.pool = PagePool(layout, n_pages, config.device)
        self.transport = wire.transport
        self.lease_s = config.lease_s
        self.n_evicted = self.n_expired = 0
        self._layout_hash = self.pool.layout_hash
        self._cluster_key = config.cluster_key
        self._clock, self._randbits = config.clock, config.randbits
        self._wire = wire
        self._lock = self.pool.lock
        # The generation of each page, in host memory also where the pool is not. They start at
        # random, so that another process's memory at the same address does not pass for ours.
        self.counters = np.array([config.randbits(62) for _ in range(n_pages)], dtype=np.uint64)
        self._by_page: dict[int, _Window] = {}  # each window under all of its pages
        self._by_key: dict[bytes, _Window] = {}
        self._kept: dict[bytes, _Window] = {}  # without readers, oldest release first
        self._leases: dict[str, _Lease] = {}
        self._n_malformed = self._n_unknown = 0
        self._closing = threading.Event()
        self._woken = threading.Event()
        wire.on_notification = self._woken.set
        start = partial(wire.open, self.pool, self.counters)
        self._thread = make_thread("exporter", start, self._run, self._end_all)

    @property
    def n_leases(self) -> int:
        return len(self._leases)

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    @property
    def n_kept_pages(self) -> int:
        with self._lock:
            return sum(len(window.pages) for window in self._kept.values())

    @property
    def n_read_pages(self) -> int:
        with self._lock:
            return sum(window.readers > 0 for window in self._by_page.values())

    @property
    def n_free_pages(self) -> int:
        """Pages that `reserve` can give: free ones, and kept ones without readers."""
        with self._lock:
            return self.pool.n_free + self.n_kept_pages

    def refused(self) -> Mapping[str, int]:
        """Ignored notifications by reason. A release may arrive after its lease's end."""
        return {"malformed": self._n_malformed, "unknown_lease": self._n_unknown}

    def reserve(self, n_pages: int, timeout_s: float = 0.0) -> Pages | None:
        """Take pages, waiting up to `timeout_s`; None if there are too few.

        Kept windows are evicted, oldest release first. Raises WorkerDrainingError when closed.
        """
        self._refuse_closed()
        pages = self.pool.allocate(n_pages, timeout_s, self._evict)
        if pages is not None:
            with self._lock:
                self._bump(pages)
        return pages

    def abandon(self, pages: Sequence[int]) -> None:
        """Give back reserved pages that were not published."""
        with self._lock:
            self._refuse_published(pages)
            self._free(pages)

    def publish(
        self,
        pages: Sequence[int],
        *,
        request_id: str,
        window: int,
        attempt: int,
        frames: int,
        key: bytes = b"",
    ) -> CrossKVHandle:
        """Lease written pages to whoever holds the returned, signed handle.

        The caller's writes are finished (and on a GPU synchronised). key: for `publish_again`; it
        replaces what was published under it before. Empty: nothing finds the pages again.

        Raises:
            ValueError: pages and frames do not fit each other, or the pages are published already.
            RuntimeError: the pages are not reserved.
            WorkerDrainingError: the exporter is closed.
        """
        with self._lock:
            lease = self._lease(self._add(pages, frames, key))
        return self._handle(lease, request_id, window, attempt)

    def publish_again(
        self, key: bytes, *, request_id: str, window: int, attempt: int
    ) -> CrossKVHandle | None:
        """A further lease on the window under `key`, or None. WorkerDrainingError if closed."""
        self._refuse_closed()
        with self._lock:
            if (found := self._by_key.get(key)) is None:
                return None
            lease = self._lease(found)
        return self._handle(lease, request_id, window, attempt)

    def revoke(self, lease: str) -> bool:
        """End a lease now; False if it is unknown or has ended."""
        with self._lock:
            known = self._leases.get(lease)
            if known is None:
                self._n_unknown += 1
                return False
            self._end(known)
            return True

    def check_integrity(self, n_leases: int = 0, n_reserved: int = 0) -> None:
        """Raise RuntimeError unless the tables agree, with so many leases and reserved pages."""
        with self._lock:
            windows = set(self._by_page.values())
            readers = sum(window.readers for window in windows)
            if not readers == len(self._leases) == n_leases:
                raise RuntimeError(
                    f"{len(self._leases)} leases are open and {readers} readers counted, "
                    f"expected {n_leases}"
                )
            for window in windows:
                is_kept = self._kept.get(window.key) is window
                is_found = self._by_key.get(window.key) is window
                if is_kept == bool(window.readers) or is_found != bool(window.key):
                    raise RuntimeError(f"the window in pages {window.pages} is under a wrong key")
            pages = sum(len(window.pages) for window in windows)
            if pages != len(self._by_page) or not windows.issuperset(self._by_key.values()):
                raise RuntimeError("a table has windows that are not published")
            self.pool.check_integrity(pages + n_reserved)

    def healthy(self) -> str | None:
        closed = "the KV exporter is closed" if self._closing.is_set() else None
        return self._thread.failure or closed

    def close(self) -> None:
        """End every lease, deregister and stop: readers lose the KV. Idempotent."""
        self._closing.set()
        self._woken.set()
        self._thread.join()

    def handle_notifications(self, payloads: Iterable[bytes]) -> None:
        """Act on what peers sent; what is not ours is counted and dropped."""
        for payload in payloads:
            kind, leases = parse_notification(payload) or ("", [])
            if not kind:
                self._n_malformed += 1
            elif kind == "REN":
                self._renew(leases)
            else:
                self.revoke(leases[0])

    def expire(self) -> None:
        now = self._clock()
        with self._lock:
            for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
                self.n_expired += 1
                self._end(lease)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            self._woken.wait(POLL_S if self._leases else IDLE_POLL_S)
            self._woken.clear()
            # Renewals before expiry: a process that was stopped for a while must not end leases
            # whose renewals have already arrived. Nor may it end those whose readers could not
            # renew: a reader in this process was stopped too, and handles may not have left it.
            self.handle_notifications(self._wire.drain())
            before, looked = looked, time.monotonic()
            if looked - before > STALL_S:
                with self._lock:
                    for lease in self._leases.values():
                        lease.deadline += looked - before
            self.expire()

    def _end_all(self) -> None:
        with self._lock:
            for window in tuple(self._by_key.values()):
                self._forget(window)
            for lease in tuple(self._leases.values()):
                self._end(lease)
        self._wire.close()

    def _renew(self, ids: Sequence[str]) -> None:
        deadline = self._clock() + self.lease_s
        with self._lock:
            for lease_id in ids:
                if lease := self._leases.get(lease_id):
                    lease.deadline = deadline
                else:
                    self._n_unknown += 1

    def _handle(self, lease: _Lease, request_id: str, window: int, attempt: int) -> CrossKVHandle:
        pages = lease.window.pages
        unsigned = CrossKVHandle(
            request_id=request_id,
            window=window,
            attempt=attempt,
            agent=self._wire.agent,
            metadata=self._wire.metadata,
            layout_hash=self._layout_hash,
            addresses=self.pool.addresses(pages),
            page_bytes=self.pool.page_bytes,
            frames=lease.window.frames,
            counter_address=int(self.counters.ctypes.data) + pages[0] * COUNTER_BYTES,
            generation=lease.generation,
            lease=lease.id,
            remaining_s=self.lease_s,
            payload=self.layout.payload,
        )
        return sign(unsigned, self._cluster_key)

    # What follows is called with the lock held.

    def _add(self, pages: Sequence[int], frames: int, key: bytes) -> _Window:
        self._refuse_closed()
        if not 1 <= frames <= self.layout.n_frames:
            raise ValueError(f"frames {frames} is not in 1..{self.layout.n_frames}")
        if not self.layout.pages_for(frames) <= len(pages) <= self.layout.pages_per_window:
            raise ValueError(
                f"{len(pages)} pages cannot hold {frames} frames of a window: expected "
                f"{self.layout.pages_for(frames)} to {self.layout.pages_per_window}"
            )
        self.pool.check_used(pages)
        self._refuse_published(pages)
        if before := self._by_key.get(key):
            self._forget(before)
        window = _Window(tuple(pages), frames, key)
        self._by_page.update(dict.fromkeys(window.pages, window))
        if key:
            self._by_key[key] = window
        return window

    def _lease(self, window: _Window) -> _Lease:
        window.readers += 1
        self._kept.pop(window.key, None)
        generation, deadline = int(self.counters[window.pages[0]]), self._clock() + self.lease_s
        lease = _Lease(f"{self._randbits(128):032x}", window, generation, deadline)
        self._leases[lease.id] = lease
        if len(self._leases) == 1:
            self._woken.set()  # ends the idle wait, since releases are to come
        return lease

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.id]
        window = lease.window
        window.readers -= 1
        if window.readers:
            return
        if window.key:
            self._kept[window.key] = window
            self.pool.wake()  # it can be evicted
        else:
            self._remove(window)

    def _evict(self) -> bool:
        window = next(iter(self._kept.values()), None)
        if window is None:
            return False
        self.n_evicted += 1
        self._forget(window)
        return True

    def _forget(self, window: _Window) -> None:
        """Take a window's key away; its pages are freed once it has no readers."""
        self._by_key.pop(window.key, None)
        self._kept.pop(window.key, None)
        window.key = b""
        if not window.readers:
            self._remove(window)

    def _remove(self, window: _Window) -> None:
        for page in window.pages:
            del self._by_page[page]
        self._free(window.pages)

    def _free(self, pages: Sequence[int]) -> None:
        """Give pages back, counters first: a free page may be written by its next owner."""
        self.pool.check_used(pages)
        self._bump(pages)
        self.pool.release(pages)

    def _bump(self, pages: Sequence[int]) -> None:
        self.counters[list(pages)] += np.uint64(1)

    def _refuse_published(self, pages: Sequence[int]) -> None:
        if not self._by_page.keys().isdisjoint(pages):
            taken = sorted(page for page in pages if page in self._by_page)
            raise ValueError(f"pages {taken} are published")

    def _refuse_closed(self) -> None:
        if reason := self.healthy():
            raise WorkerDrainingError(reason)
