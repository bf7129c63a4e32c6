"""How windows get their answers: from pages just written or published before, or an error.

Pages that were written are published under the window's key. Windows of the same audio that waited
with it, or came when it was published already, get further leases on the same pages. Everything but
`fail` and `find` runs on the thread of a lane. Another lane's thread may evict what nobody reads:
so those that waited get their leases while the window's own is still unanswered.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.common.errors import KVLostError, SequenceFailedError, WorkerError
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.pool import Pages
from cluster.common.messages import EncodeReply, EncodeRequest, EncodeTimings
from cluster.common.metrics import Recorder
from encoder_worker.batcher import Batcher, QueuedWindow

KEY_BYTES = 32


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of all lanes since the start.

    failed: windows, expired ones included. encode_s: of all batches; of one lane, times in which
    two overlap count once. bulk_s: the part of it that was for bulk windows. hits: windows that
    needed no encode; misses: windows with a key that were encoded.
    """

    batches: int = 0
    windows: int = 0
    failed: int = 0
    expired: int = 0
    encode_s: float = 0.0
    bulk_s: float = 0.0
    hits: int = 0
    misses: int = 0


class Publisher:
    """Of an engine, for all its lanes."""

    def __init__(
        self,
        exporter: KVExporter,
        recorder: Recorder,
        clock: Callable[[], float],
        dtype: str,
        *,
        reuses: bool,
    ) -> None:
        """dtype: that the encoder computes in, as the settings say it ("int8" included).

        reuses: whether KV is kept for further windows of the same audio.
        """
        self.exporter, self.recorder, self.clock = exporter, recorder, clock
        self._counts = Counts()
        self._lock = threading.Lock()  # guards the counts
        self._reuses = reuses
        worker = f"{dtype}\0{exporter.layout.hash}"
        self._worker = hashlib.blake2b(worker.encode(), digest_size=KEY_BYTES).digest()

    def count(self, **amounts: float) -> None:
        """Add to counts. From any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def counts(self) -> Counts:
        with self._lock:
            return replace(self._counts)

    def key_of(self, request: EncodeRequest) -> bytes:
        """Under which a window's KV is kept; empty where it is not."""
        if not (self._reuses and request.kept_key):
            return b""
        return hashlib.blake2b(request.kept_key, digest_size=KEY_BYTES, key=self._worker).digest()

    def find(self, request: EncodeRequest, key: bytes, queue_s: float) -> EncodeReply | None:
        """The answer from KV that is there already; counts a hit. WorkerDrainingError if closed."""
        if not key or request.fresh:
            return None
        handle = self.exporter.publish_again(
            key, request_id=request.request_id, window=request.window, attempt=request.attempt
        )
        if handle is None:
            return None
        self.count(hits=1)
        return EncodeReply(handle, EncodeTimings(queue_s, 0.0, 0), reused=True)

    def share(self, window: QueuedWindow) -> bool:
        """Answer a window with KV that is published already, or with what prevents that alone.

        False when there is none.
        """
        queue_s = self.clock() - window.arrived_s
        try:
            reply = self.find(window.request, window.key, queue_s)
        except Exception as error:
            self.fail(window, _as_ours(error))
            return True
        if reply is None:
            return False
        self.recorder.observe("splitscribe_encoder_queue_seconds", queue_s)
        self._answer(window, reply)
        return True

    def publish(
        self, window: QueuedWindow, pages: Pages, timings: EncodeTimings, batcher: Batcher
    ) -> None:
        """Publish written pages and answer the window, and those that waited for its KV."""
        if window.key:
            self.count(misses=1)
        request = window.request
        try:
            handle = self.exporter.publish(
                pages,
                request_id=request.request_id,
                window=request.window,
                attempt=request.attempt,
                # Whisper attends to the padding too, as far as it was encoded.
                frames=request.context or self.exporter.layout.n_frames,
                key=window.key,
            )
        except Exception as error:
            self.give_up(window, pages, error)
            return  # those that waited are encoded in their turn
        for duplicate in batcher.take_duplicates(window.key):
            if not self.share(duplicate):
                self.fail(
                    duplicate, KVLostError("the KV of the same audio was gone before it was shared")
                )
        reused = False if window.key else None
        self._answer(window, EncodeReply(handle, timings, reused=reused))

    def give_up(self, window: QueuedWindow, pages: Pages, error: Exception) -> None:
        """Fail a window with a typed error that keeps its cause; its pages are free again."""
        self.exporter.abandon(pages)
        self.fail(window, _as_ours(error))

    def fail(self, window: QueuedWindow, error: Exception) -> None:
        """From any thread. Does nothing if the window has an answer already."""
        if window.future.done():
            return
        self.count(failed=1)
        if window.future.set_running_or_notify_cancel():
            window.future.set_exception(error)

    def _answer(self, window: QueuedWindow, reply: EncodeReply) -> None:
        """A window that was cancelled gives its lease back; what is kept stays for its like."""
        if window.future.set_running_or_notify_cancel():
            window.future.set_result(reply)
        else:
            self.exporter.revoke(reply.handle.lease)


def _as_ours(error: Exception) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    ours = SequenceFailedError(f"this window could not be encoded: {error}")
    ours.__cause__ = error
    return ours
