"""How windows get their answers: from pages just written, from pages published before, or an error.

Pages that were written are published under the window's key. Windows of the same audio that waited
with it, or came when it was published already, get further leases on the same pages. Everything
but `fail` runs on the thread of its lane. Another lane's thread may evict what nobody reads: so
those that waited get their leases while the window's own is still unanswered.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from cluster.common.errors import KVLostError, SequenceFailedError, WorkerError
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.pool import Pages
from cluster.common.messages import EncodeReply, EncodeRequest, EncodeTimings
from cluster.common.metrics import Recorder
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.stats import Counts, ReuseStats


class Publisher:
    """clock: monotonic seconds, the batcher's."""

    def __init__(
        self,
        batcher: Batcher,
        exporter: KVExporter,
        reuse: KVReuse,
        counts: Counts,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._batcher = batcher
        self._exporter = exporter
        self._reuse = reuse
        self._counts = counts
        self._recorder = recorder
        self._clock = clock

    def publish(self, window: QueuedWindow, pages: Pages, timings: EncodeTimings) -> None:
        """Publish written pages and answer the window, and those that waited for its KV."""
        if window.key:
            self._reuse.missed()
        try:
            reply = self._lease_or_keep(window, pages, timings)
        except Exception as error:
            self._exporter.abandon(pages)
            self.fail(window, as_worker_error(error))
            return  # those that waited are encoded in their turn
        for duplicate in self._batcher.take_duplicates(window.key):
            if not self.share(duplicate):
                self.fail(
                    duplicate, KVLostError("the KV of the same audio was gone before it was shared")
                )
        if reply is not None:
            self._answer(window, reply)

    def share(self, window: QueuedWindow) -> bool:
        """Answer a window with KV that is published already; False when there is none."""
        if not window.may_share:
            return False
        queue_s = self._clock() - window.arrived_s
        try:
            reply = self._reuse.find(window.request, window.key, queue_s)
        except WorkerError as error:
            self.fail(window, error)
            return True
        if reply is None:
            return False
        self._recorder.observe("splitscribe_encoder_queue_seconds", queue_s)
        self._answer(window, reply)
        return True

    def fail(self, window: QueuedWindow, error: Exception) -> None:
        """From any thread. Does nothing if the window has an answer already."""
        if window.future.done():
            return
        self._counts.add_failed()
        if window.future.set_running_or_notify_cancel():
            window.future.set_exception(error)

    def _lease_or_keep(
        self, window: QueuedWindow, pages: Pages, timings: EncodeTimings
    ) -> EncodeReply | None:
        """None if the window was cancelled: its duplicates wait, or its client may come again."""
        exporter, request, key = self._exporter, window.request, window.key
        # Whisper attends to the padding too, as far as it was encoded.
        frames = request.context or exporter.layout.n_frames
        if window.future.cancelled():
            if key:
                exporter.keep(pages, frames=frames, key=key)
            else:
                exporter.abandon(pages)
            return None
        handle = exporter.publish(
            pages,
            request_id=request.request_id,
            window=request.window,
            attempt=request.attempt,
            frames=frames,
            key=key,
        )
        return EncodeReply(handle, timings, reused=False if key else None)

    def _answer(self, window: QueuedWindow, reply: EncodeReply) -> None:
        if window.future.set_running_or_notify_cancel():
            window.future.set_result(reply)
        else:
            self._exporter.revoke(reply.handle.lease)


def as_worker_error(error: Exception) -> Exception:
    """What a window's future fails with: a typed error that keeps its cause."""
    if isinstance(error, WorkerError):
        return error
    failure = SequenceFailedError(f"this window could not be encoded: {error}")
    failure.__cause__ = error
    return failure


KEY_BYTES = 32


class KVReuse:
    """Finds published KV for windows. Thread-safe."""

    def __init__(self, exporter: KVExporter, dtype: str, enabled: bool) -> None:
        """dtype: that the encoder computes in, as the settings say it ("int8" included)."""
        self._exporter = exporter
        self._enabled = enabled
        worker = f"{dtype}\0{exporter.layout.hash}"
        self._worker = hashlib.blake2b(worker.encode(), digest_size=KEY_BYTES).digest()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def key_of(self, request: EncodeRequest) -> bytes:
        """Under which a window's KV is kept; empty where it is not."""
        if not self._enabled or not request.audio_key:
            return b""
        named = request.audio_key + request.context.to_bytes(4, "big")
        return hashlib.blake2b(named, digest_size=KEY_BYTES, key=self._worker).digest()

    def find(self, request: EncodeRequest, key: bytes, queue_s: float) -> EncodeReply | None:
        """The answer from KV that is there already; counts a hit.

        Raises:
            WorkerDrainingError: the exporter is closed.
        """
        if not key or request.fresh:
            return None
        handle = self._exporter.publish_again(
            key, request_id=request.request_id, window=request.window, attempt=request.attempt
        )
        if handle is None:
            return None
        with self._lock:
            self._hits += 1
        return EncodeReply(handle, EncodeTimings(queue_s, 0.0, 0), reused=True)

    def missed(self) -> None:
        """A window with a key was encoded."""
        with self._lock:
            self._misses += 1

    def stats(self) -> ReuseStats:
        exporter = self._exporter
        kept_bytes = exporter.n_kept_pages * exporter.pool.page_bytes
        with self._lock:
            hits, misses = self._hits, self._misses
        return ReuseStats(exporter.n_kept, kept_bytes, hits, misses, exporter.n_evicted)
