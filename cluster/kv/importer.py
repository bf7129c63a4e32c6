"""The decoder's side of the hand-off: verify handles, hold their leases, fetch their pages.

The same for every transport; a `Wire` moves the bytes. Callers' threads verify handles and queue
commands here; `cluster.kv.reader` carries them out on the one thread that owns the wire.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from cluster.errors import (
    HandleRefusedError,
    KVLostError,
    LayoutMismatchError,
    PeerLostError,
    WorkerDrainingError,
)
from cluster.kv.handles import check_key, verify
from cluster.kv.layout import PageLayout
from cluster.kv.pool import PagePool
from cluster.kv.reader import Reader
from cluster.kv.reads import Fetch, Ledger
from cluster.kv.tally import Tally
from cluster.kv.transfer import RENEW_S, FetchStats
from cluster.kv.wire import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Wire, as_configuration_error
from cluster.messages import CrossKVHandle

logger = logging.getLogger(__name__)

MAX_QUARANTINED = 0.25  # of the pool; above it the replica is unhealthy

_Command = Callable[[], None]


class Importer:
    """A KVImporter over some transport's wire. See `cluster.kv.transfer.KVImporter`."""

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        wire: Wire,
        *,
        cluster_key: bytes,
        device: str = "cpu",
        fetch_timeout_s: float = 10.0,
        renew_s: float = RENEW_S,
    ) -> None:
        self.layout = layout
        self.pool = PagePool(layout, n_pages, device)
        self._layout_hash = layout.hash
        self._cluster_key = check_key(cluster_key)
        self._wire = wire
        self._ledger = Ledger()
        self._refused = Tally()
        self._reader = Reader(
            self.pool,
            wire,
            self._ledger,
            self._refused,
            fetch_timeout_s=fetch_timeout_s,
            renew_s=renew_s,
        )
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._submit_lock = threading.Lock()
        self._closed = False
        self._failure: str | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="kv-importer", daemon=True
        )
        self._thread.start()
        opened.result(OPEN_TIMEOUT_S)

    @property
    def transport(self) -> str:
        """What moves the bytes; more precise once the first peer was read from."""
        return self._wire.transport

    @property
    def n_held(self) -> int:
        """Handles whose leases are being renewed."""
        return len(self._ledger)

    @property
    def projection_s(self) -> float:
        """Told to exporters with each release; see `ReadReport`."""
        return self._reader.projection_s

    @projection_s.setter
    def projection_s(self, seconds: float) -> None:
        self._reader.projection_s = seconds

    @property
    def landing_pool(self) -> PagePool | None:
        """None: it has one payload."""
        return None

    def pool_for(self, handle: CrossKVHandle) -> PagePool:
        """Its only pool; see `KVImporter`."""
        return self.pool

    def accept(self, handle: CrossKVHandle) -> None:
        """Verify `handle` and keep its lease alive until it is fetched or dropped.

        Raises:
            HandleRefusedError: signature wrong (checked first).
            LayoutMismatchError: another layout.
            PeerLostError: its exporter is gone, or did not answer an earlier read.
            WorkerDrainingError: the importer is closed.
        """
        self._verify(handle)
        self._ledger.hold(handle)
        if not self._submit(partial(self._reader.connect, handle)):
            self._ledger.let_go(handle.lease)
            raise WorkerDrainingError(self.healthy() or "the KV importer is closed")

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        """Read an accepted handle's payload into own `pages`, then check its generation.

        Ends the hold on the handle, whatever the outcome. The pages are the reader's until the
        future resolves, also when the handle is dropped meanwhile.

        Returns:
            A future that cannot be cancelled. It raises KVLostError (or its subclasses
            StaleGenerationError, PeerLostError, TransferTimeoutError) or WorkerDrainingError.
            After TransferTimeoutError the pages are in quarantine and come back to the pool by
            themselves; after anything else they are the caller's again.

        Raises:
            ValueError: `pages` are not as many as the handle's.
            RuntimeError: they are not in use in this pool.
        """
        if len(pages) != len(handle.addresses):
            raise ValueError(f"{len(pages)} pages for a handle of {len(handle.addresses)}")
        self.pool.check_used(pages)
        fetch = Fetch(handle, tuple(pages), Future())
        fetch.future.set_running_or_notify_cancel()
        try:
            self._ledger.begin_fetch(handle)
        except KVLostError as error:
            if isinstance(error, PeerLostError):
                self.drop(handle)
            else:
                self._refused.add("replayed")
            fetch.future.set_exception(error)
            return fetch.future
        if not self._submit(partial(self._reader.start, fetch)):
            self._ledger.let_go(handle.lease)
            fetch.future.set_exception(WorkerDrainingError("the KV importer is closed"))
        return fetch.future

    def drop(self, handle: CrossKVHandle) -> None:
        """Stop renewing and release the lease; harmless when already fetched or dropped."""
        if self._ledger.let_go(handle.lease):
            self._submit(partial(self._reader.release, handle))

    def refused(self) -> Mapping[str, int]:
        """See `KVImporter.refused`."""
        return self._refused.counts()

    def healthy(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self._closed:
            return "the KV importer is closed"
        stuck = self.pool.n_quarantined
        if stuck > MAX_QUARANTINED * self.pool.n_pages:
            return f"{stuck} of {self.pool.n_pages} KV pages wait for overdue READs to end"
        return None

    def close(self) -> None:
        """Release every lease, deregister and stop; idempotent. Fetches in flight fail."""
        with self._submit_lock:
            self._closed = True
            self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the KV importer's thread did not stop in %.0f s", CLOSE_TIMEOUT_S)

    def _verify(self, handle: CrossKVHandle) -> None:
        try:
            verify(handle, self._cluster_key)
        except HandleRefusedError:
            self._refused.add("signature")
            raise
        try:
            self._check_layout(handle)
        except LayoutMismatchError:
            self._refused.add("layout")
            raise

    def _check_layout(self, handle: CrossKVHandle) -> None:
        expected = (self.layout.payload, self._layout_hash)
        if (handle.payload, handle.layout_hash) != expected:
            raise LayoutMismatchError(
                f"the KV handle of {handle.agent} is for {handle.payload} in layout "
                f"{handle.layout_hash}, expected {expected[0]} in {expected[1]}: encoder and "
                f"decoder run different models or settings"
            )
        fits = self.layout.pages_for(handle.frames) <= len(handle.addresses)
        if handle.page_bytes != self.pool.page_bytes or not fits or handle.frames < 1:
            raise LayoutMismatchError(
                f"the KV handle has {len(handle.addresses)} pages of {handle.page_bytes} bytes "
                f"for {handle.frames} frames, which does not fit its layout"
            )

    def _submit(self, command: _Command) -> bool:
        """Queue a command; False once closed, since nothing would carry it out."""
        with self._submit_lock:
            if self._closed:
                return False
            self._commands.put(command)
            return True

    def _run(self, opened: Future[None]) -> None:
        try:
            self._reader.open()
        except Exception as error:
            self._failure = f"the KV importer could not start: {error}"
            opened.set_exception(as_configuration_error(error))
            return
        opened.set_result(None)
        try:
            self._loop()
        except Exception as error:
            logger.exception("the KV importer's thread died")
            self._failure = f"the KV importer's thread died: {error}"
        finally:
            with self._submit_lock:
                self._closed = True
            try:
                self._reader.close()
            finally:
                self._refuse_rest()

    def _loop(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=self._reader.wait_s())
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                command()  # one at a time: posting may take long, and others are to be polled
            self._reader.step()

    def _refuse_rest(self) -> None:
        """Carry out what is still queued: the closed reader fails each fetch."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()
