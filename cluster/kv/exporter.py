"""The encoder's side of the hand-off: reserve, publish, and free on release or expiry.

The same for every transport; an `Inbox` makes the memory readable and brings notifications. One
thread owns the inbox: it takes releases and renewals and ends leases that ran out. Pages come back
by one path, `_free`: their counters are bumped first, so that a late reader sees the change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from cluster.errors import WorkerDrainingError
from cluster.kv.handles import check_key, sign
from cluster.kv.layout import PageLayout
from cluster.kv.leases import GenerationCounters, LeaseTable
from cluster.kv.pool import PagePool
from cluster.kv.transfer import LEASE_S, ReadReport
from cluster.kv.wire import (
    CLOSE_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    Inbox,
    as_configuration_error,
    parse_notification,
)
from cluster.messages import CrossKVHandle

logger = logging.getLogger(__name__)

DRAIN_S = 0.005  # how often notifications are taken while a lease is open
IDLE_DRAIN_S = 0.05  # and while none is


class Exporter:
    """A KVExporter over some transport's inbox. See `cluster.kv.transfer.KVExporter`."""

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        inbox: Inbox,
        *,
        cluster_key: bytes,
        device: str = "cpu",
        lease_s: float = LEASE_S,
    ) -> None:
        self.layout = layout
        self.pool = PagePool(layout, n_pages, device)
        self.transport = inbox.transport
        self.on_read: Callable[[ReadReport], None] | None = None
        self.n_malformed = 0  # notifications that were none of ours
        self._layout_hash = layout.hash
        self._cluster_key = check_key(cluster_key)
        self._inbox = inbox
        self._counters = GenerationCounters(n_pages)
        self._leases = LeaseTable(lease_s)
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._failure: str | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="kv-exporter", daemon=True
        )
        self._thread.start()
        opened.result(OPEN_TIMEOUT_S)

    @property
    def agent(self) -> str:
        """Name of this exporter in handles; another one after every restart."""
        return self._inbox.agent

    @property
    def n_ignored(self) -> int:
        """Notifications about leases that were not (or no longer) known."""
        return self._leases.n_ignored

    @property
    def n_expired(self) -> int:
        """Leases that ended because nobody renewed or released them."""
        return self._leases.n_expired

    def refused(self) -> Mapping[str, int]:
        """See `KVExporter.refused`."""
        return {"malformed": self.n_malformed, "unknown_lease": self.n_ignored}

    def reserve(self, n_pages: int, timeout_s: float = 0.0) -> tuple[int, ...] | None:
        """Take free pages to write to; None when there were not enough within `timeout_s`."""
        self._refuse_closed()
        pages = self.pool.allocate(n_pages, timeout_s)
        if pages is not None:
            self._counters.bump(pages)
        return pages

    def abandon(self, pages: Sequence[int]) -> None:
        """Give back reserved pages that were not published."""
        self._leases.check_unleased(pages)
        self._free(pages)

    def publish(
        self, pages: Sequence[int], *, request_id: str, window: int, attempt: int, frames: int
    ) -> CrossKVHandle:
        """Lease written pages to whoever holds the returned handle.

        Raises:
            ValueError: pages and frames do not fit each other, or the pages are leased already.
            RuntimeError: the pages are not reserved.
            WorkerDrainingError: the exporter is closed.
        """
        self._refuse_closed()
        if not 1 <= frames <= self.layout.n_frames:
            raise ValueError(f"frames {frames} is not in 1..{self.layout.n_frames}")
        if not self.layout.pages_for(frames) <= len(pages) <= self.layout.pages_per_window:
            raise ValueError(
                f"{len(pages)} pages cannot hold {frames} frames of a window: expected "
                f"{self.layout.pages_for(frames)} to {self.layout.pages_per_window}"
            )
        self.pool.check_used(pages)
        generation = self._counters.value(pages[0])
        lease = self._leases.open(pages)
        if len(self._leases) == 1:
            self._woken.set()  # ends the idle wait: releases are to come
        unsigned = CrossKVHandle(
            request_id=request_id,
            window=window,
            attempt=attempt,
            agent=self._inbox.agent,
            metadata=self._inbox.metadata,
            layout_hash=self._layout_hash,
            addresses=tuple(self.pool.address(page) for page in pages),
            page_bytes=self.pool.page_bytes,
            frames=frames,
            counter_address=self._counters.address(pages[0]),
            generation=generation,
            lease=lease.id,
            remaining_s=self._leases.lease_s,
            payload=self.layout.payload,
        )
        return sign(unsigned, self._cluster_key)

    def revoke(self, lease: str) -> bool:
        """End a lease now; False when it is not (or no longer) known."""
        pages = self._leases.end(lease)
        if pages is None:
            return False
        self._free(pages)
        return True

    def active_leases(self) -> int:
        return len(self._leases)

    def healthy(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self._closing.is_set():
            return "the KV exporter is closed"
        return None

    def close(self) -> None:
        """End every lease, deregister and stop; idempotent. Readers still at it lose the KV."""
        self._closing.set()
        self._woken.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the KV exporter's thread did not stop in %.0f s", CLOSE_TIMEOUT_S)

    def handle_notifications(self, payloads: Iterable[bytes]) -> None:
        """Act on what peers sent. Untrusted: what is not ours is counted and dropped."""
        for payload in payloads:
            message = parse_notification(payload)
            if message is None:
                self.n_malformed += 1
                continue
            if message.kind == "REN":
                self._leases.renew(message.leases)
            elif (pages := self._leases.end(message.leases[0])) is not None:
                self._free(pages)
                if message.times_s is not None and self.on_read is not None:
                    n_bytes = len(pages) * self.pool.page_bytes
                    self.on_read(ReadReport(n_bytes, *message.times_s))

    def _run(self, opened: Future[None]) -> None:
        try:
            self._inbox.open(self.pool, self._counters)
        except Exception as error:
            self._failure = f"the KV exporter could not start: {error}"
            opened.set_exception(as_configuration_error(error))
            return
        opened.set_result(None)
        try:
            while not self._closing.is_set():
                self._woken.wait(DRAIN_S if len(self._leases) else IDLE_DRAIN_S)
                self._woken.clear()
                # Renewals before expiry: a process that was stopped for a while must not end
                # leases whose renewals are waiting in its inbox.
                self.handle_notifications(self._inbox.drain())
                self._free_all(self._leases.expire())
        except Exception as error:
            logger.exception("the KV exporter's thread died")
            self._failure = f"the KV exporter's thread died: {error}"
        finally:
            self._free_all(self._leases.end_all())
            self._inbox.close()

    def _free_all(self, page_sets: Iterable[Sequence[int]]) -> None:
        for pages in page_sets:
            self._free(pages)

    def _free(self, pages: Sequence[int]) -> None:
        """The one way back. Counters first: once a page is free, its next owner may write."""
        self.pool.check_used(pages)
        self._counters.bump(pages)
        self.pool.release(pages)

    def _refuse_closed(self) -> None:
        if reason := self.healthy():
            raise WorkerDrainingError(reason)
