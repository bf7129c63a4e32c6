"""Answers windows with handles to pages just written or published before, or with an error.

Pages are published under the window's key; windows of the same audio get further leases on them.
`share`, `publish` and `give_up` are for a lane's thread, the rest for any. Another lane may evict
pages without readers, so waiting duplicates get leases before the window itself is answered.
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
    """Totals of all lanes since the start."""

    batches: int = 0
    windows: int = 0
    failed: int = 0  # expired ones included
    expired: int = 0
    encode_s: float = 0.0  # of all batches; where two of a lane overlap, time counts once
    bulk_s: float = 0.0  # the part of it for bulk windows
    hits: int = 0  # windows that needed no encode
    misses: int = 0  # windows with a key that were encoded


class Publisher:
    def __init__(
        self,
        exporter: KVExporter,
        recorder: Recorder,
        clock: Callable[[], float],
        dtype: str,  # what the encoder computes in, as in the settings ("int8" included)
        *,
        reuses: bool,  # keep KV for further windows of the same audio
    ) -> None:
        self.exporter, self.recorder, self.clock = exporter, recorder, clock
        self._counts = Counts()
        self._lock = threading.Lock()  # guards the counts
        self._reuses = reuses
        worker = f"{dtype}\0{exporter.layout.hash}"
        self._worker = hashlib.blake2b(worker.encode(), digest_size=KEY_BYTES).digest()

    def count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def counts(self) -> Counts:
        with self._lock:
            return replace(self._counts)

    def key_of(self, request: EncodeRequest) -> bytes:
        if not (self._reuses and request.kept_key):
            return b""
        return hashlib.blake2b(request.kept_key, digest_size=KEY_BYTES, key=self._worker).digest()

    def find(self, request: EncodeRequest, key: bytes, queue_s: float) -> EncodeReply | None:
        """Answer from published KV and count a hit; None without. WorkerDrainingError if closed."""
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
        """Answer a window from published KV, or fail it if that raises; False if there is none."""
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
        """Publish written pages; answer the window and the duplicates that waited for its KV."""
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
            return  # its duplicates are encoded in their turn
        for duplicate in batcher.take_duplicates(window.key):
            if not self.share(duplicate):
                self.fail(
                    duplicate, KVLostError("the KV of the same audio was gone before it was shared")
                )
        reused = False if window.key else None
        self._answer(window, EncodeReply(handle, timings, reused=reused))

    def give_up(self, window: QueuedWindow, pages: Pages, error: Exception) -> None:
        self.exporter.abandon(pages)
        self.fail(window, _as_ours(error))

    def fail(self, window: QueuedWindow, error: Exception) -> None:
        """Fail a window unless it has an answer already. From any thread."""
        if window.future.done():
            return
        self.count(failed=1)
        if window.future.set_running_or_notify_cancel():
            window.future.set_exception(error)

    def _answer(self, window: QueuedWindow, reply: EncodeReply) -> None:
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
