"""An encoder engine without its weights and its thread: how windows come in, and its state.

Windows come in by `submit` and go into the queue of the loop. Who runs the loop is not known here:
a thread in `encoder_worker.engine`, and in a simulation a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

import numpy as np

from cluster.common.errors import (
    ConfigurationError,
    InvalidAudioError,
    WorkerDrainingError,
)
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.layout import KVLayout
from cluster.common.messages import (
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    WINDOW_SAMPLES,
    CrossKVHandle,
    EncodeReply,
    EncodeRequest,
    FileMel,
    Pcm,
    WorkerLoad,
)
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.loop import EncodeLoop
from encoder_worker.publisher import KVReuse
from encoder_worker.stats import EncoderStats, total


class EncoderCore:
    """Takes windows, and tells what is there; the parts belong together."""

    def __init__(
        self,
        exporter: KVExporter,
        batcher: Batcher,
        reuse: KVReuse,
        loop: EncodeLoop,
        n_audio_ctx: int,
        bulk: Lane | None = None,
    ) -> None:
        """n_audio_ctx: encoder positions of the checkpoint. bulk: None: the others' lane."""
        self._exporter = exporter
        self._batcher = batcher
        self._reuse = reuse
        self._loop = loop
        own = Lane(batcher, loop)
        self._bulk = bulk or own
        self._lanes = (own,) if bulk is None else (own, bulk)
        self._n_audio_ctx = n_audio_ctx
        self._draining = False
        self._closing = False
        self._failure: str | None = None

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        """Queue one window, or answer it at once where the KV of the same audio is there.

        Cancelling the future takes the window out, and ends the lease if one was just given.

        Returns:
            A future of the reply. It fails with DeadlineExceededError when the window's time ran
            out first, and with SequenceFailedError when this window cannot be encoded.

        Raises:
            InvalidAudioError: the samples are not what `EncodeRequest` promises.
            WorkerDrainingError: the engine takes nothing new, or has failed.
        """
        check_request(request, self._n_audio_ctx)
        if self._draining or self._closing:
            raise WorkerDrainingError("this encoder worker is shutting down")
        if reason := self.healthy():
            raise WorkerDrainingError(reason)  # another one can take it
        future: Future[EncodeReply] = Future()
        key = self._reuse.key_of(request)
        if (reply := self._reuse.find(request, key, 0.0)) is not None:
            future.set_result(reply)
            return future
        lane = self._bulk if request.priority == "bulk" else self._lanes[0]
        lane.begin()
        window = lane.batcher.put(request, future, key)
        future.add_done_callback(partial(_drop_cancelled, lane.batcher, ref(window)))
        if self._closing:  # `close` may have emptied the queue between the check and the put
            lane.loop.fail_queued(WorkerDrainingError("this encoder worker is shutting down"))
        return future

    def revoke(self, handle: CrossKVHandle) -> bool:
        """Free the pages of a reply that nobody will use; False when they are free already."""
        return self._exporter.revoke(handle.lease)

    def load(self) -> WorkerLoad:
        """That of `stats`, without all that makes up the rest: large pools ask for it often."""
        loops = [lane.loop.counts for lane in self._lanes]
        work = sum(lane.batcher.work for lane in self._lanes)
        return WorkerLoad(work, window_s=total(loops).window_s)

    def stats(self) -> EncoderStats:
        counts = total([lane.loop.counts for lane in self._lanes])
        queues = [lane.batcher for lane in self._lanes]
        exporter = self._exporter
        per_window, n_pages = exporter.layout.pages_per_window, exporter.pool.n_pages
        return EncoderStats(
            queued=sum(queue.n_distinct for queue in queues),
            queued_audio_s=sum(queue.queued_audio_s for queue in queues),
            running=sum(queue.n_in_flight for queue in queues),
            slack_s=min(queue.slack_s for queue in queues),
            leases=exporter.n_leases,
            read=exporter.n_read_pages / per_window,
            pages_free=exporter.n_free_pages,
            pages_total=n_pages,
            windows_exported=n_pages // per_window,
            batches=counts.batches,
            windows=counts.windows,
            failed=counts.failed,
            expired=counts.expired,
            encode_s=counts.encode_s,
            window_s=counts.window_s,
            work=sum(queue.work for queue in queues),
            queued_work=sum(queue.queued_work for queue in queues),
            reuse=self._reuse.stats(),
        )

    def healthy(self) -> str | None:
        """None when well, else why not."""
        return self._failure or self._exporter.healthy()

    def begin_drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True

    def is_idle(self) -> bool:
        """Nothing is queued, encoded or leased."""
        queues = [lane.batcher for lane in self._lanes]
        is_busy = any(len(one) or one.n_in_flight for one in queues)
        return not (is_busy or self._exporter.n_leases)


def _drop_cancelled(
    batcher: Batcher, known: ref[QueuedWindow], future: Future[EncodeReply]
) -> None:
    """The window is known by a weak reference: it holds the future, which keeps this callback.

    Else its audio would stay until Python looks for circles.
    """
    if future.cancelled() and (window := known()) is not None:
        batcher.cancel(window)


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Lane:
    """begin: called before a window is put into the queue, so that its loop runs; idempotent."""

    batcher: Batcher
    loop: EncodeLoop
    begin: Callable[[], None] = field(default=_nothing)


def check_request(request: EncodeRequest, n_audio_ctx: int) -> None:
    """Raise InvalidAudioError unless samples and context are what `EncodeRequest` promises."""
    _check_pcm(request)
    context = request.context
    if not 0 <= context <= n_audio_ctx:
        raise InvalidAudioError(f"a context has 0 to {n_audio_ctx} positions, got {context}")
    if context and request.n_samples > context * SAMPLES_PER_POSITION:
        raise InvalidAudioError(
            f"{request.n_samples} samples do not fit a context of {context} positions"
        )


def _check_pcm(request: EncodeRequest) -> None:
    pcm = request.pcm
    if request.file_mel is not None:
        _check_slice(pcm, request.file_mel)
        return
    if pcm.dtype != np.int16 or pcm.ndim != 1 or not 1 <= pcm.shape[0] <= WINDOW_SAMPLES:
        raise InvalidAudioError(
            f"a window is int16 [1..{WINDOW_SAMPLES}], got {pcm.dtype} {list(pcm.shape)}"
        )


def _check_slice(pcm: Pcm, file_mel: FileMel) -> None:
    n_before, n_frames = file_mel.n_before, file_mel.n_frames
    if pcm.dtype != np.int16 or pcm.ndim != 1:
        raise InvalidAudioError(f"a window is int16 [n], got {pcm.dtype} {list(pcm.shape)}")
    if n_before % HOP_LENGTH or not 0 <= n_before <= MEL_CONTEXT_SAMPLES:
        raise InvalidAudioError(
            f"the context before a window is a multiple of {HOP_LENGTH} up to "
            f"{MEL_CONTEXT_SAMPLES} samples, got {n_before}"
        )
    if not 1 <= n_frames <= WINDOW_SAMPLES // HOP_LENGTH or not math.isfinite(file_mel.log_max):
        raise InvalidAudioError(
            f"a window has 1 to {WINDOW_SAMPLES // HOP_LENGTH} mel frames below a finite maximum, "
            f"got {n_frames} and {file_mel.log_max}"
        )
    most = n_before + n_frames * HOP_LENGTH + MEL_CONTEXT_SAMPLES
    if not n_before < pcm.shape[0] <= most:
        raise InvalidAudioError(
            f"a window of {n_frames} mel frames with {n_before} samples before it has "
            f"{n_before + 1} to {most} samples, got {pcm.shape[0]}"
        )


def check_layout(checkpoint: Checkpoint, exporter: KVExporter) -> None:
    """Raise ConfigurationError unless the exporter's pages are for this checkpoint."""
    layout, dims = exporter.layout, checkpoint.dims
    expected: tuple[int, ...]
    found: tuple[int, ...]
    if isinstance(layout, KVLayout):
        expected = (dims.n_text_layer, dims.n_text_head, dims.text_head_dim, dims.n_audio_ctx)
        found = (layout.n_layer, layout.n_head, layout.head_dim, layout.n_frames)
    else:
        expected = (dims.n_audio_state, dims.n_audio_ctx)
        found = (layout.n_state, layout.n_frames)
    if found != expected or layout.model != checkpoint.fingerprint:
        raise ConfigurationError(
            f"the exporter's layout is of another checkpoint: its {layout.payload} has sizes "
            f"{found}, expected {expected}"
        )
    if exporter.pool.n_pages < layout.pages_per_window:
        raise ConfigurationError(
            f"the export pool has {exporter.pool.n_pages} pages, but one window takes "
            f"{layout.pages_per_window}: raise encoder.export_windows"
        )
