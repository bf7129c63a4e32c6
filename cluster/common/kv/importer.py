"""The decoder's end of a transfer: verifies handles, holds their leases, fetches their pages.

Callers' threads verify handles and queue commands; the wire's thread runs them on a `Reader`, which
has all state of handles and peers.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from cluster.common.errors import HandleRefusedError, LayoutMismatchError, WorkerDrainingError
from cluster.common.kv.handles import verify
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.reader import Fetch, Reader
from cluster.common.kv.wire import FetchStats, TransferConfig, Wire, WireThread
from cluster.common.messages import CrossKVHandle

MAX_QUARANTINED = 0.25  # of the pool; above it the replica is unhealthy
STUCK_S = 30.0  # a longer call of the wire makes the replica unhealthy, too

_Command = Callable[[], None]


class KVImporter:
    """Verifies handles of one payload, keeps their leases alive, READs their pages into its pool.

    `accept` verifies a handle, and renews its lease from then on; `fetch` reads it and releases the
    lease; `drop` only releases it. Any thread may call any method; none waits for a transfer.
    """

    def __init__(
        self, layout: PageLayout, n_pages: int, config: TransferConfig, wire: Wire
    ) -> None:
        """Open `wire` and own it from now on. Raises ConfigurationError."""
        self.layout = layout
        self.pool = PagePool(layout, n_pages, config.device)
        self._layout_hash = self.pool.layout_hash
        self._cluster_key = config.cluster_key
        self._wire = wire
        self._clock = config.clock
        self._begun_s = math.inf  # when the wire's thread began its present call
        self._reader = Reader(self.pool, wire, config, self._count_refusal)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._refused: Counter[str] = Counter()
        self._closed = False
        self._thread = WireThread("importer", self._reader.open, self._run, self._end)

    @property
    def transport(self) -> str:
        return self._wire.transport

    def accept(self, handle: CrossKVHandle) -> None:
        """Verify `handle` and keep its lease alive until it is fetched or dropped.

        Raises:
            HandleRefusedError: its signature is wrong; this is checked first.
            LayoutMismatchError: it is of another layout.
            PeerLostError: its exporter is gone, or an earlier READ from it is overdue.
            WorkerDrainingError: the importer is closed.
        """
        try:
            verify(handle, self._cluster_key)
        except HandleRefusedError:
            self._count_refusal("signature")
            raise
        self._check_layout(handle)
        self._reader.check(handle.agent)
        if not self._submit(partial(self._reader.hold, handle)):
            raise WorkerDrainingError(self.healthy() or "the KV importer is closed")

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        """READ an accepted handle's payload into `pages` of the pool, then check its generation.

        The handle is no longer held afterwards, whatever the outcome. The pages are the importer's
        until the future resolves, also when the handle is dropped meanwhile; after a
        TransferTimeoutError they stay in quarantine until nothing can write to them.

        Returns:
            A future that cannot be cancelled. It raises KVLostError (the handle is not held),
                StaleGenerationError, PeerLostError, TransferTimeoutError or WorkerDrainingError
                (closed).

        Raises:
            ValueError: `pages` are not as many as the handle's.
            RuntimeError: they are not in use in this pool.
        """
        if len(pages) != len(handle.addresses):
            raise ValueError(f"{len(pages)} pages for a handle of {len(handle.addresses)}")
        self.pool.check_used(pages)
        fetch = Fetch(handle, tuple(pages), Future())
        fetch.future.set_running_or_notify_cancel()
        if not self._submit(partial(self._reader.start, fetch)):
            fetch.future.set_exception(WorkerDrainingError("the KV importer is closed"))
        return fetch.future

    def drop(self, handle: CrossKVHandle) -> None:
        """Release the lease; does nothing after a fetch or drop."""
        self._submit(partial(self._reader.drop, handle))

    def refused(self) -> Mapping[str, int]:
        """Number of refused handles by reason: signature, layout, replayed or stale."""
        with self._lock:
            return dict(self._refused)

    def healthy(self) -> str | None:
        if self._thread.failure is not None:
            return self._thread.failure
        if self._closed:
            return "the KV importer is closed"
        held_up_s = self._clock() - self._begun_s
        if held_up_s > STUCK_S:
            return f"the KV transport has not returned for {held_up_s:.0f} s"
        stuck = self.pool.n_quarantined
        if stuck > MAX_QUARANTINED * self.pool.n_pages:
            return f"{stuck} of {self.pool.n_pages} KV pages wait for overdue READs to end"
        return None

    def close(self) -> None:
        """Release every lease, deregister and stop; idempotent.

        Reads in flight get a moment to end; then their fetches fail.
        """
        with self._lock:
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    def _check_layout(self, handle: CrossKVHandle) -> None:
        expected = (self.layout.payload, self._layout_hash)
        n_pages, most = len(handle.addresses), self.layout.pages_per_window
        fits = 1 <= handle.frames <= self.layout.n_frames
        fits = fits and self.layout.pages_for(handle.frames) <= n_pages <= most
        if (handle.payload, handle.layout_hash) != expected:
            problem = (
                f"the KV handle of {handle.agent} is for {handle.payload} in layout "
                f"{handle.layout_hash}, expected {expected[0]} in {expected[1]}: encoder and "
                f"decoder run different models or settings"
            )
        elif handle.page_bytes != self.pool.page_bytes or not fits:
            problem = (
                f"the KV handle has {len(handle.addresses)} pages of {handle.page_bytes} bytes "
                f"for {handle.frames} frames, which does not fit its layout"
            )
        else:
            return
        self._count_refusal("layout")
        raise LayoutMismatchError(problem)

    def _count_refusal(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _submit(self, command: _Command) -> bool:
        with self._lock:
            if self._closed:
                return False  # nothing would carry it out
            self._commands.put(command)
            return True

    def _run(self) -> None:
        while True:
            self._begun_s = math.inf
            try:
                command = self._commands.get(timeout=self._reader.wait_s())
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                self._begun_s = self._clock()
                command()  # one at a time, since posting may take long and reads are to be polled
            self._begun_s = self._clock()
            self._reader.step()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        try:
            self._reader.close()
        finally:
            while not self._commands.empty():  # the closed reader fails each fetch
                if (command := self._commands.get()) is not None:
                    command()
