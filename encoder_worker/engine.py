"""The encoder worker's engine: windows in, handles to published KV out.

Any thread may submit windows (`encoder_worker.core`). Each lane has a thread that runs its
`encoder_worker.loop`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cluster.common.cores import usable_cores
from cluster.common.errors import WorkerDiedError, WorkerDrainingError
from cluster.common.kv.exporter import KVExporter
from cluster.common.metrics import ENCODER_METRICS, Recorder, silent_recorder
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import resolve_device, resolve_dtype, use_threads
from cluster.common.model.encoder_context import (
    FILE,
    EncoderContext,
    chosen_context,
    unused_settings,
)
from cluster.common.priorities import run_when_idle
from cluster.common.settings import EncoderSettings
from encoder_worker.batcher import Batcher
from encoder_worker.core import SHUTTING_DOWN, EncoderCore
from encoder_worker.forward import WindowEncoder
from encoder_worker.loop import EncodeLoop
from encoder_worker.publisher import Publisher

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
STUCK_S = 120.0  # a batch counts as hung when it has taken longer than this
STUCK_WINDOWS = 10.0  # and longer than its expected time by this factor
SLOWEST_WINDOW_S = 60.0  # assumed until the first window was measured

GPU_BATCH = 8  # windows; large-v3 is near its compute bound from two on
CORES_PER_WINDOW = 8  # on a CPU a batch has no more throughput than its windows one by one


def auto_batch(device: str) -> int:
    """Windows in a batch where the settings leave it open."""
    if device != "cpu":
        return GPU_BATCH
    return max(1, usable_cores() // CORES_PER_WINDOW)


class EncoderEngine(EncoderCore):
    """The caller owns the exporter, and closes it after the engine."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        exporter: KVExporter,
        settings: EncoderSettings,
        recorder: Recorder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the weights, warm up and start. `exporter` is of this checkpoint.

        Raises ConfigurationError if checkpoint and device do not fit each other.
        """
        self.device = resolve_device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device)
        rule = chosen_context(checkpoint, settings)
        _log_context(settings, rule)
        forward = WindowEncoder(
            checkpoint,
            self.dtype,
            self.device,
            payload=exporter.layout.payload,
            kv_dtype=exporter.pool.tensor.dtype,
            int8=settings.dtype == "int8",
            contexts=() if rule is None else rule.lengths(checkpoint.dims.n_audio_ctx),
        )
        self._threads = settings.threads
        max_batch = settings.max_batch or auto_batch(self.device)
        recorder = recorder or silent_recorder(ENCODER_METRICS)
        dtype = f"{self.dtype} {settings.dtype}"
        publisher = Publisher(exporter, recorder, clock, dtype, reuses=settings.cache)
        make_queue = partial(Batcher, max_batch, settings.batch_wait_ms / 1000, clock=clock)
        forwards = [forward]
        if self.device == "cpu":
            forwards = [
                forward.beside(is_urgent=True),
                forward,
                forward.beside(own_threads=True),
            ]
        # On a CPU a second bulk window keeps cores busy while the first one has few units left. On
        # a GPU it would make other requests wait longer.
        n_bulk = 2 if self.device == "cpu" else 1
        loops: list[EncodeLoop] = []
        for one in forwards:
            beside = loops[0] if len(loops) == 1 else None
            queue = make_queue(bulk_at_once=n_bulk)
            loops.append(EncodeLoop(queue, publisher, one, max_batch, beside=beside))
        self._lane_threads: dict[EncodeLoop, threading.Thread] = {}
        self._starting = threading.Lock()
        self._clock = clock
        super().__init__(publisher, loops, checkpoint.dims.n_audio_ctx)
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="encoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish the rest; False if windows or leases are left at `timeout_s`."""
        self.begin_drain()
        end = time.monotonic() + timeout_s
        while not self.is_idle():
            if time.monotonic() >= end or not self._thread.is_alive():
                return self.is_idle()
            time.sleep(DRAIN_POLL_S)
        return True

    def close(self) -> None:
        """Stop after the current batch; queued windows fail. Idempotent."""
        with self._starting:
            self._closing = True
        for loop in self._loops:
            loop.stop()
        for thread in (self._thread, *self._lane_threads.values()):
            thread.join()
        for loop in self._loops:
            loop.forward.close()
            loop.fail_queued(WorkerDrainingError(SHUTTING_DOWN))

    def healthy(self) -> str | None:
        """Ignores a CPU's lane of bulk windows, which may stand still while others work."""
        for loop in self._loops[:-1] or self._loops:
            batch_s = loop.max_batch * (loop.window_s or SLOWEST_WINDOW_S)
            silent_s = self._clock() - loop.turned_s
            if loop.is_busy and silent_s > max(STUCK_S, STUCK_WINDOWS * batch_s):
                return f"the encoder's batch has not returned for {silent_s:.0f} s"
        return super().healthy()

    def _will_queue(self, loop: EncodeLoop) -> None:
        """Start the loop's thread unless it runs; the first loop's always does."""
        if loop is self._loops[0]:
            return
        with self._starting:
            if loop not in self._lane_threads and not self._closing:
                thread = threading.Thread(
                    target=self._run_lane, args=(loop,), name="encoder-lane", daemon=True
                )
                self._lane_threads[loop] = thread
                thread.start()

    def _run_lane(self, loop: EncodeLoop) -> None:
        if loop is self._loops[-1]:
            run_when_idle()
        use_threads(self._threads)
        self._go_on(loop)

    def _run(self, started: Future[None]) -> None:
        try:
            use_threads(self._threads)
            self._loops[0].warm_up()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._go_on(self._loops[0])

    def _go_on(self, loop: EncodeLoop) -> None:
        try:
            while not self._closing:
                loop.step()
        except Exception as error:
            logger.exception("the encoder's thread died")
            self._failure = f"the encoder's thread died: {error}"
            # One of its windows may be the cause, so this counts as a try of each.
            loop.fail_all(WorkerDiedError(self._failure))


def _log_context(settings: EncoderSettings, rule: EncoderContext | None) -> None:
    if rule is not None:
        logger.info(
            "windows of at most %g s get the encoder positions of their audio and %d more",
            rule.max_content_s,
            rule.slack,
        )
    elif unused := unused_settings(settings, rule):
        logger.warning(
            "%s: without effect, since the checkpoint has no %s and encoder.context is auto; "
            "windows are trimmed with encoder.context: trimmed",
            " and ".join(unused),
            FILE,
        )
