"""The encoder worker's engine: windows in, handles to published KV out.

One thread owns the device. Per batch: take windows, reserve their export pages, log-mel, encoder,
cross K/V into the pages, publish. On a GPU, and on a CPU once its kernels are built, the next
batch, if it is full, is launched before this one is waited for. No window holds a page before it
is encoded; a full export pool stops the loop until pages come free, which is the backpressure that
reaches the client. Knows no Serve, no HTTP and no decoder.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cluster.errors import (
    ConfigurationError,
    DeadlineExceededError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.kv.exporter import KVExporter
from cluster.messages import (
    WINDOW_SAMPLES,
    CrossKVHandle,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
)
from cluster.metrics import ENCODER_METRICS, Recorder, silent_recorder
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import resolve_device, resolve_dtype, usable_cores, use_threads
from cluster.settings import EncoderSettings
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.checks import as_worker_error, check_pcm
from encoder_worker.exports import Exports, Pages, reserve
from encoder_worker.forward import WindowEncoder
from encoder_worker.gpu.static_encoder import Ready
from encoder_worker.stats import Counts, EncoderStats

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25  # how long the loop sleeps with an empty queue; a new window wakes it
PAGE_WAIT_S = 0.05  # how long it waits for pages before it looks for expired windows again
DRAIN_POLL_S = 0.02

GPU_BATCH = 8  # windows; large-v3 is near its compute bound from two on
CORES_PER_WINDOW = 8  # on a CPU a batch has no more throughput than its windows one by one


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that the device works on, or has done; `reserved` are pages of `exporter`."""

    exporter: KVExporter
    batch: list[QueuedWindow]
    reserved: list[Pages]
    started_s: float
    ready: Ready


def auto_batch(device: str) -> int:
    """Windows in a batch where the settings leave it open."""
    if device != "cpu":
        return GPU_BATCH
    return max(1, usable_cores() // CORES_PER_WINDOW)


class EncoderEngine:
    """Encodes windows on its own thread and publishes their KV, or states, by an exporter.

    Exporters belong to the caller, who closes them after the engine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        exporter: KVExporter,
        settings: EncoderSettings,
        recorder: Recorder | None = None,
        other: KVExporter | None = None,
    ) -> None:
        """Load the weights, run one window to warm up, and start.

        Args:
            exporter: its pool's payload is what is published.
            other: of the other payload; given both, the measured links say which a batch takes.

        Raises:
            ConfigurationError: checkpoint, device or layout do not fit each other.
        """
        self._exports = Exports(checkpoint, exporter, other)
        self.device = resolve_device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device)
        self._forward = WindowEncoder(
            checkpoint,
            self.dtype,
            self.device,
            projects=self._exports.has_kv,
            int8=settings.dtype == "int8",
        )
        self._threads = settings.threads
        self._recorder = recorder or silent_recorder(ENCODER_METRICS)
        self._max_batch = settings.max_batch or auto_batch(self.device)
        self._batcher = Batcher(self._max_batch, settings.batch_wait_ms / 1000)
        self._counts = Counts()
        self._running: list[QueuedWindow] = []
        self._done_s = 0.0  # when the device was last found done
        self._draining = False
        self._closing = False
        self._failure: str | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="encoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        """Queue one window.

        Cancelling the future takes the window out, and ends the lease if one was just given.

        Returns:
            A future of the reply. It fails with DeadlineExceededError when the window's time ran
            out first, and with SequenceFailedError when this window cannot be encoded.

        Raises:
            InvalidAudioError: the samples are not what `EncodeRequest` promises.
            WorkerDrainingError: the engine takes nothing new.
            WorkerError: the engine has failed.
        """
        check_pcm(request)
        if self._draining or self._closing:
            raise WorkerDrainingError("this encoder worker is shutting down")
        if reason := self.healthy():
            raise WorkerError(reason)
        future: Future[EncodeReply] = Future()
        window = self._batcher.put(request, future)
        future.add_done_callback(partial(self._drop_cancelled, window))
        if self._closing:  # `close` may have emptied the queue between the check and the put
            self._fail_queued(WorkerDrainingError("this encoder worker is shutting down"))
        return future

    def revoke(self, handle: CrossKVHandle) -> bool:
        """Free the pages of a reply that nobody will use; False when they are free already."""
        return self._exports.revoke(handle)

    def stats(self) -> EncoderStats:
        counts = self._counts
        return EncoderStats(
            queued=len(self._batcher),
            queued_audio_s=self._batcher.queued_audio_s,
            running=self._batcher.n_in_flight,
            slack_s=self._batcher.slack_s,
            leases=self._exports.n_leases,
            pages_free=self._exports.n_free_pages,
            pages_total=self._exports.n_pages,
            windows_exported=self._exports.n_windows,
            batches=counts.batches,
            windows=counts.windows,
            failed=counts.failed,
            expired=counts.expired,
            encode_s=counts.encode_s,
            window_s=counts.window_s,
            sends_states=self._exports.next().layout.payload == "encoder_states",
        )

    def healthy(self) -> str | None:
        """None when well, else why not."""
        return self._failure or self._exports.healthy()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is queued, wait until every exported page is free.

        Returns:
            False when that was not so after `timeout_s`.
        """
        self._draining = True
        end = time.monotonic() + timeout_s
        while not self._is_idle():
            if time.monotonic() >= end or not self._thread.is_alive():
                return self._is_idle()
            time.sleep(DRAIN_POLL_S)
        return True

    def close(self) -> None:
        """Stop after the current batch; queued windows fail. Idempotent."""
        self._closing = True
        self._batcher.wake()
        self._thread.join()
        self._forward.close()
        self._fail_queued(WorkerDrainingError("this encoder worker is shutting down"))

    def _is_idle(self) -> bool:
        return not len(self._batcher) and not (self._batcher.n_in_flight or self._exports.n_leases)

    def _run(self, started: Future[None]) -> None:
        try:
            use_threads(self._threads)
            self._warm_up()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._step()
        except Exception as error:
            logger.exception("the encoder's thread died")
            self._failure = f"the encoder's thread died: {error}"
            for window in self._running:
                self._fail(window, WorkerError(self._failure))
            self._fail_queued(WorkerError(self._failure))

    def _step(self) -> None:
        n_ready = self._batcher.wait(IDLE_WAIT_S)
        self._fail_expired()
        if not n_ready:
            return
        launched = self._take(n_ready, PAGE_WAIT_S)
        while launched is not None:
            # The device goes on with a full batch while the host publishes this one. A batch that
            # is not full has nothing to gain from an early start: it may still grow.
            self._fail_expired()
            full = self._forward.is_async and len(self._batcher) >= self._max_batch
            goes_on = full and not self._closing
            following = self._take(self._max_batch, 0.0) if goes_on else None
            self._complete(launched)
            launched = following

    def _take(self, n_windows: int, page_wait_s: float) -> _Launched | None:
        """Launch the next windows, as many as there are pages for; None when that is none."""
        exporter = self._exports.next()
        reserved = reserve(exporter, n_windows, page_wait_s)
        batch = self._batcher.pop(len(reserved))
        for surplus in reserved[len(batch) :]:  # windows were cancelled meanwhile
            exporter.abandon(surplus)
        if not batch:
            return None
        self._running += batch
        return self._launch(exporter, batch, reserved[: len(batch)])

    def _launch(
        self, exporter: KVExporter, batch: list[QueuedWindow], reserved: list[Pages]
    ) -> _Launched | None:
        """Begin a batch; None when it could not be begun, and its windows were seen to alone."""
        started_s = time.monotonic()
        pcm = [window.request.pcm for window in batch]
        file_mels = [window.request.file_mel for window in batch]
        try:
            ready = self._forward(pcm, exporter.pool.tensor, reserved, file_mels)
        except torch.AcceleratorError:
            raise  # the device is lost to this process, not the batch: Serve replaces the replica
        except Exception as error:
            self._encode_alone(exporter, batch, reserved, error)
            return None
        return _Launched(exporter, batch, reserved, started_s, ready)

    def _complete(self, launched: _Launched) -> None:
        """Wait for a batch and publish it."""
        try:
            launched.ready.wait()
        except torch.AcceleratorError:
            raise  # as in `_launch`
        except Exception as error:
            self._encode_alone(launched.exporter, launched.batch, launched.reserved, error)
            return
        batch, now = launched.batch, time.monotonic()
        encode_s = now - max(launched.started_s, self._done_s)  # not while it stood behind another
        self._done_s = now
        self._counts.add_batch(len(batch), encode_s)
        self._recorder.observe("splitscribe_encode_seconds", encode_s)
        self._recorder.observe("splitscribe_encoder_batch_windows", len(batch))
        for window, pages in zip(batch, launched.reserved, strict=True):
            queue_s = launched.started_s - window.arrived_s
            self._recorder.observe("splitscribe_encoder_queue_seconds", queue_s)
            timings = EncodeTimings(queue_s, encode_s, len(batch))
            self._publish(launched.exporter, window, pages, timings)
        self._finish(batch)

    def _encode_alone(
        self,
        exporter: KVExporter,
        batch: list[QueuedWindow],
        reserved: list[Pages],
        error: Exception,
    ) -> None:
        """Try the windows of a batch that failed one by one, so that only the culprits fail."""
        if len(batch) == 1:
            exporter.abandon(reserved[0])
            self._fail(batch[0], as_worker_error(error))
            self._finish(batch)
            return
        logger.warning("a batch of %d failed, trying one by one: %s", len(batch), error)
        for window, pages in zip(batch, reserved, strict=True):
            if launched := self._launch(exporter, [window], [pages]):
                self._complete(launched)

    def _finish(self, batch: list[QueuedWindow]) -> None:
        self._running = [window for window in self._running if window not in batch]
        self._batcher.finish(batch)
        self._record_gauges()

    def _publish(
        self, exporter: KVExporter, window: QueuedWindow, pages: Pages, timings: EncodeTimings
    ) -> None:
        if window.future.cancelled():
            exporter.abandon(pages)
            return
        request = window.request
        try:
            handle = exporter.publish(
                pages,
                request_id=request.request_id,
                window=request.window,
                attempt=request.attempt,
                frames=exporter.layout.n_frames,  # Whisper attends to the padding too
            )
        except Exception as error:
            exporter.abandon(pages)
            self._fail(window, as_worker_error(error))
            return
        if window.future.set_running_or_notify_cancel():
            window.future.set_result(EncodeReply(handle, timings))
        else:
            exporter.revoke(handle.lease)

    def _warm_up(self) -> None:
        """One window of silence, so that the first request does not pay for first calls."""
        silence = np.zeros(WINDOW_SAMPLES, dtype=np.int16)
        for exporter in self._exports:
            pool, reserved = exporter.pool.tensor, reserve(exporter, 1, PAGE_WAIT_S)
            if not reserved:
                raise ConfigurationError("the export pool has no free page at start")
            try:
                self._forward.prepare(pool, self._max_batch)
                self._forward([silence], pool, reserved).wait()
                if self._exports.wants_choice and exporter.layout.payload == "cross_kv":
                    self._exports.choose_by(self._forward.time_projection(pool, reserved[0]))
            finally:
                exporter.abandon(reserved[0])

    def _drop_cancelled(self, window: QueuedWindow, future: Future[EncodeReply]) -> None:
        if future.cancelled():
            self._batcher.cancel(window)

    def _fail_expired(self) -> None:
        for window in self._batcher.expire():
            self._counts.expired += 1
            self._fail(window, DeadlineExceededError("no encoder had room for it in time"))

    def _fail_queued(self, error: Exception) -> None:
        for window in self._batcher.clear():
            self._fail(window, error)

    def _fail(self, window: QueuedWindow, error: Exception) -> None:
        if window.future.done():
            return
        self._counts.failed += 1
        if window.future.set_running_or_notify_cancel():
            window.future.set_exception(error)

    def _record_gauges(self) -> None:
        record = self._recorder.set
        record("splitscribe_encoder_queue_windows", len(self._batcher))
        record("splitscribe_encoder_queue_audio_seconds", self._batcher.queued_audio_s)
        record("splitscribe_export_pages_free", self._exports.n_free_pages)
        record("splitscribe_export_leases", self._exports.n_leases)
