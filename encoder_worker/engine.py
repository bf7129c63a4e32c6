"""The encoder worker's engine: windows in, handles to published KV out.

Any thread may submit. One thread owns the device, and what that one does is in
`encoder_worker.loop`. Knows no Serve, no HTTP and no decoder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cluster.errors import WorkerDrainingError
from cluster.jit.background import wait_for_builds
from cluster.kv.exporter import KVExporter
from cluster.messages import (
    CrossKVHandle,
    EncodeReply,
    EncodeRequest,
)
from cluster.metrics import ENCODER_METRICS, Recorder, silent_recorder
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import resolve_device, resolve_dtype, usable_cores, use_threads
from cluster.model.encoder_context import chosen_context
from cluster.settings import EncoderSettings
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.checks import check_request
from encoder_worker.export_pages import Exports
from encoder_worker.forward import WindowEncoder
from encoder_worker.loop import EncodeLoop
from encoder_worker.reuse import KVReuse
from encoder_worker.stats import EncoderStats

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02

GPU_BATCH = 8  # windows; large-v3 is near its compute bound from two on
CORES_PER_WINDOW = 8  # on a CPU a batch has no more throughput than its windows one by one


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
        *,
        kernels_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the weights, run one window to warm up, and start.

        Args:
            exporter: its pool's payload is what is published.
            other: of the other payload; given both, the measured links say which a batch takes.
            kernels_s: how long to wait for a CPU's compiled kernels before that.
            clock: monotonic seconds, of deadlines and of what is measured.

        Raises:
            ConfigurationError: checkpoint, device or layout do not fit each other.
        """
        self._exports = Exports(checkpoint, exporter, other)
        self._n_audio_ctx = checkpoint.dims.n_audio_ctx
        self.device = resolve_device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device)
        rule = chosen_context(checkpoint, settings)
        forward = WindowEncoder(
            checkpoint,
            self.dtype,
            self.device,
            projects=self._exports.has_kv,
            kv_dtype=self._exports.kv_dtype,
            int8=settings.dtype == "int8",
            contexts=() if rule is None else rule.lengths(checkpoint.dims.n_audio_ctx),
            float8=settings.dtype == "float8",
        )
        self._threads = settings.threads
        max_batch = settings.max_batch or auto_batch(self.device)
        self._batcher = Batcher(
            max_batch,
            settings.batch_wait_ms / 1000,
            clock=clock,
            bulk_at_once=settings.bulk_windows,
        )
        recorder = recorder or silent_recorder(ENCODER_METRICS)
        self._reuse = KVReuse(self._exports, f"{self.dtype} {settings.dtype}", settings.cache)
        self._loop = EncodeLoop(
            self._batcher, self._exports, self._reuse, forward, max_batch, recorder, clock
        )
        self._draining = False
        self._closing = False
        self._failure: str | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started, kernels_s), name="encoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

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
        window = self._batcher.put(request, future, key)
        future.add_done_callback(partial(self._drop_cancelled, window))
        if self._closing:  # `close` may have emptied the queue between the check and the put
            self._loop.fail_queued(WorkerDrainingError("this encoder worker is shutting down"))
        return future

    def revoke(self, handle: CrossKVHandle) -> bool:
        """Free the pages of a reply that nobody will use; False when they are free already."""
        return self._exports.revoke(handle)

    def stats(self) -> EncoderStats:
        counts = self._loop.counts
        return EncoderStats(
            queued=self._batcher.n_distinct,
            queued_audio_s=self._batcher.queued_audio_s,
            running=self._batcher.n_in_flight,
            slack_s=self._batcher.slack_s,
            leases=self._exports.n_leases,
            read=self._exports.n_read,
            pages_free=self._exports.n_free_pages,
            pages_total=self._exports.n_pages,
            windows_exported=self._exports.n_windows,
            batches=counts.batches,
            windows=counts.windows,
            failed=counts.failed,
            expired=counts.expired,
            encode_s=counts.encode_s,
            window_s=counts.window_s,
            work=self._batcher.work,
            queued_work=self._batcher.queued_work,
            sends_states=self._exports.next().layout.payload == "encoder_states",
            reuse=self._reuse.stats(),
        )

    def healthy(self) -> str | None:
        """None when well, else why not."""
        return self._failure or self._exports.healthy()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is queued, wait until no exported page is leased.

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
        self._loop.stop()
        self._thread.join()
        self._loop.forward.close()
        self._loop.fail_queued(WorkerDrainingError("this encoder worker is shutting down"))

    def _is_idle(self) -> bool:
        return not len(self._batcher) and not (self._batcher.n_in_flight or self._exports.n_leases)

    def _run(self, started: Future[None], kernels_s: float) -> None:
        try:
            use_threads(self._threads)
            if kernels_s:
                wait_for_builds(kernels_s)
            self._loop.warm_up()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._loop.step()
        except Exception as error:
            logger.exception("the encoder's thread died")
            self._failure = f"the encoder's thread died: {error}"
            self._loop.fail_all(WorkerDrainingError(self._failure))

    def _drop_cancelled(self, window: QueuedWindow, future: Future[EncodeReply]) -> None:
        if future.cancelled():
            self._batcher.cancel(window)
