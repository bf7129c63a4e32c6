"""The encoder's end of a transfer: pages are reserved, published, read under leases, and freed.

The same for every transport. One thread owns the wire: it takes releases and renewals, and ends
leases that ran out. A window published under a key stays in its pages after its last lease, for the
next reader of the same audio, until the pages are needed. Pages come back by one path, `_free`,
which bumps their counters first, so that a late reader sees the change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from cluster.common.errors import WorkerDrainingError
from cluster.common.kv.handles import parse_notification, sign
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool, Pages
from cluster.common.kv.published import Lease, PublishedWindows
from cluster.common.kv.transfer_config import TransferConfig
from cluster.common.kv.wires.wire import MakeThread, Wire, WireThread
from cluster.common.messages import CrossKVHandle

POLL_S = 0.005  # between two looks for notifications while a lease is open
IDLE_POLL_S = 0.9  # and while none is; a lease that opens ends the wait
STALL_S = 1.0  # between two looks: longer only where this thread or its process was held up


class KVExporter:
    """Owns a pool, publishes filled pages under a lease, and frees them on release.

    Life of a page set: `reserve`, then the engine writes, then `publish`; now the pages are leased,
    until the reader's release, the lease's expiry or `revoke`. Without a key they are free then.
    With one they are kept, and `publish_again` leases them to further readers, until `reserve`
    evicts them. `abandon` gives back reserved pages that were never published.

    All methods may be called from any thread; none waits for a transfer.

    published: what is leased and kept, to be looked at.
    """

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        config: TransferConfig,
        wire: Wire,
        make_thread: MakeThread = WireThread,
    ) -> None:
        """Takes over `wire`: opens it now, and closes it.

        make_thread: what runs the wire; where it runs nothing, its maker calls
            `handle_notifications` and `expire` itself.

        Raises:
            ConfigurationError: the transport does not work on this machine.
        """
        self.layout = layout
        self.pool = PagePool(layout, n_pages, config.device)
        self.transport = wire.transport
        self._layout_hash = self.pool.layout_hash
        self._cluster_key = config.cluster_key
        self._wire = wire
        self.published = PublishedWindows(n_pages, config.lease_s, config.clock, config.randbits)
        self._n_malformed = 0
        self._closing = threading.Event()
        self._woken = threading.Event()
        wire.on_notification = self._woken.set
        self._thread = make_thread("exporter", self._open, self._run, self._end)

    @property
    def n_free_pages(self) -> int:
        """Pages that `reserve` would give: free ones, and kept ones that nobody reads."""
        return self.pool.n_free + self.published.n_kept_pages

    def refused(self) -> Mapping[str, int]:
        """Notifications that were not acted on, by reason: "malformed" or "unknown_lease".

        A few of the latter are nobody's fault: a release that comes after the lease's end.
        """
        return {"malformed": self._n_malformed, "unknown_lease": self.published.n_ignored}

    def reserve(self, n_pages: int, timeout_s: float = 0.0) -> tuple[int, ...] | None:
        """Take `n_pages` free pages, waiting up to `timeout_s`; None when they are not free.

        Kept windows are evicted for them, the one that was released longest ago first.

        Raises:
            WorkerDrainingError: the exporter is closed.
        """
        self._refuse_closed()
        pages = self.pool.allocate(n_pages, timeout_s, self._evict)
        if pages is not None:
            self.published.bump(pages)
        return pages

    def abandon(self, pages: Sequence[int]) -> None:
        """Give back pages that `reserve` returned and that were not published."""
        self.published.check_unpublished(pages)
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

        The caller has finished (and on a GPU synchronised) its writes. The generation was bumped
        when the pages were reserved, so a reader of an older handle sees another value.

        Args:
            key: under which `publish_again` finds them; it takes the place of what was published
                under it before. Empty: nothing finds them.

        Raises:
            ValueError: pages and frames do not fit each other, or the pages are published already.
            RuntimeError: the pages are not reserved.
            WorkerDrainingError: the exporter is closed.
        """
        self._check(pages, frames)
        lease, outdated = self.published.publish(pages, frames, key)
        if outdated:
            self._free(outdated)
        return self._handle(lease, request_id, window, attempt)

    def publish_again(
        self, key: bytes, *, request_id: str, window: int, attempt: int
    ) -> CrossKVHandle | None:
        """A further lease on what was published under `key`; None where nothing is.

        Raises:
            WorkerDrainingError: the exporter is closed.
        """
        self._refuse_closed()
        lease = self.published.open(key)
        return None if lease is None else self._handle(lease, request_id, window, attempt)

    def keep(self, pages: Sequence[int], *, frames: int, key: bytes) -> None:
        """Publish written pages without a reader, for `publish_again`; raises as `publish`."""
        self._check(pages, frames)
        if outdated := self.published.keep(pages, frames, key):
            self._free(outdated)
        self.pool.wake()

    def _check(self, pages: Sequence[int], frames: int) -> None:
        self._refuse_closed()
        if not 1 <= frames <= self.layout.n_frames:
            raise ValueError(f"frames {frames} is not in 1..{self.layout.n_frames}")
        if not self.layout.pages_for(frames) <= len(pages) <= self.layout.pages_per_window:
            raise ValueError(
                f"{len(pages)} pages cannot hold {frames} frames of a window: expected "
                f"{self.layout.pages_for(frames)} to {self.layout.pages_per_window}"
            )
        self.pool.check_used(pages)

    def _handle(self, lease: Lease, request_id: str, window: int, attempt: int) -> CrossKVHandle:
        if self.published.n_leases == 1:
            self._woken.set()  # ends the idle wait, since releases are to come
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
            counter_address=self.published.counter_address(pages[0]),
            generation=lease.generation,
            lease=lease.id,
            remaining_s=self.published.lease_s,
            payload=self.layout.payload,
        )
        return sign(unsigned, self._cluster_key)

    def revoke(self, lease: str) -> bool:
        """End a lease now; False when it is not (or no longer) known."""
        freed = self.published.end(lease)
        if freed is not None:
            self._take_back(freed)
        return freed is not None

    def check_integrity(self, n_leases: int = 0, n_reserved: int = 0) -> None:
        """Raise RuntimeError unless so many leases and reserved pages are out, and all else agrees.

        With the defaults this holds whenever a worker is idle: every page is free or kept.
        """
        self.published.check_integrity(n_leases)
        self.pool.check_integrity(self.published.n_pages + n_reserved)

    def healthy(self) -> str | None:
        """None when well, else why not."""
        closed = "the KV exporter is closed" if self._closing.is_set() else None
        return self._thread.failure or closed

    def close(self) -> None:
        """End every lease, deregister and stop; idempotent. Readers then lose the KV."""
        self._closing.set()
        self._woken.set()
        self._thread.join()

    def handle_notifications(self, payloads: Iterable[bytes]) -> None:
        """Act on what peers sent. It is untrusted: what is not ours is counted and dropped."""
        for payload in payloads:
            message = parse_notification(payload)
            if message is None:
                self._n_malformed += 1
            elif message.kind == "REN":
                self.published.renew(message.leases)
            else:
                self.revoke(message.leases[0])

    def _open(self) -> None:
        self._wire.open(self.pool, self.published.counters)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            self._woken.wait(POLL_S if self.published.n_leases else IDLE_POLL_S)
            self._woken.clear()
            # Renewals before expiry: a process that was stopped for a while must not end leases
            # whose renewals have already arrived. Nor may it end those whose readers could not
            # renew: a reader in this process was stopped too, and handles may not have left it.
            self.handle_notifications(self._wire.drain())
            before, looked = looked, time.monotonic()
            if looked - before > STALL_S:
                self.published.extend_all(looked - before)
            self.expire()

    def expire(self) -> None:
        """End the leases that ran out. On the wire's thread."""
        for freed in self.published.expire():
            self._take_back(freed)

    def _end(self) -> None:
        for freed in self.published.end_all():
            self._take_back(freed)
        self._wire.close()

    def _take_back(self, freed: Pages) -> None:
        """A lease has ended; `freed` is empty where the window is still read, or kept."""
        if freed:
            self._free(freed)
        else:
            self.pool.wake()  # what is kept without a reader can be evicted

    def _evict(self) -> bool:
        pages = self.published.evict()
        if pages:
            self._free(pages)
        return bool(pages)

    def _free(self, pages: Sequence[int]) -> None:
        """The one way back. Counters go first: a free page may be written by its next owner."""
        self.pool.check_used(pages)
        self.published.bump(pages)
        self.pool.release(pages)

    def _refuse_closed(self) -> None:
        if reason := self.healthy():
            raise WorkerDrainingError(reason)
