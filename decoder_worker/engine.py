"""The decoder worker's engine: requests in by `submit`, answers out by futures, from any thread.

It owns a thread, and that thread owns the device: whatever other threads want of a sequence is
posted to it as a call, and made before the next step. What a step is, `decoder_worker.loop` says.
Knows nothing of Serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cluster.common.errors import WorkerDrainingError
from cluster.common.kernels.cpu.background import wait_for_builds
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import let_encoder_go_first, use_step_threads
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import DecoderSettings
from decoder_worker.build import EngineParts, build_parts
from decoder_worker.core import DecoderCore
from decoder_worker.loop import IDLE_S
from decoder_worker.prompts import PromptBuilder
from decoder_worker.warm_up import warm_up

logger = logging.getLogger(__name__)

STUCK_S = 60.0  # a step that takes longer is taken for a hang
CLOSE_S = 15.0  # how long close waits for READs in flight: longer than a READ may take
CPU_ROWS = 16
MOST_GPU_ROWS = 64  # more gain next to nothing


def auto_batch(device: str) -> int:
    """Rows where the settings leave it open, and nobody has looked at the memory."""
    return CPU_ROWS if device == "cpu" else MOST_GPU_ROWS


class DecoderEngine(DecoderCore):
    """Decodes windows by continuous batching. Made once per replica, running from then on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        importer: KVImporter,
        settings: DecoderSettings,
        *,
        kv_pool: PagePool | None = None,
        page_tokens: int = 0,
        kernels_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        may_run_bulk: Callable[[], bool] = lambda: True,
        more_bulk: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the weights, allocate the self-attention pool, start the thread and warm up.

        Args:
            importer: stays its owner's, who closes it after the engine.
            kv_pool: for KV that is projected here, where the importer reads encoder states; None:
                it reads the KV itself, into its own pool.
            page_tokens: positions in a page of self-attention KV; 0 takes what suits the device.
            kernels_s: how long to wait for a CPU's compiled kernels before that.
            clock: monotonic seconds, of deadlines and of what is measured.
            may_run_bulk: asked before each step on a CPU: whether it may be for bulk work, too.
            more_bulk: asked on a CPU whether all cores of the machine encode bulk windows.

        Raises:
            ConfigurationError: importer, checkpoint and settings do not fit each other.
            CheckpointError: the weights cannot be loaded.
        """
        if not settings.max_batch:
            rows = auto_batch(importer.pool.device.type)
            settings = settings.model_copy(update={"max_batch": rows})
        tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        parts = build_parts(checkpoint, tokenizer, importer, kv_pool, settings, page_tokens)
        self.device = parts.device
        self.transport = importer.transport
        prompts = PromptBuilder(tokenizer, checkpoint.dims)
        self._wake = threading.Event()
        super().__init__(
            parts, importer, prompts, settings, self._wake.set, clock, may_run_bulk, more_bulk
        )
        self._heartbeat = self._clock()
        started: Future[None] = Future()
        prepare = partial(self._prepare, parts, kernels_s)
        self._thread = threading.Thread(
            target=self._main, args=(prepare, started), name="decoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

    # Called from any thread.

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until all sequences ended; False when time ran out."""
        self.begin_drain()
        with self._changed:
            return self._changed.wait_for(lambda: self._n_live == 0, timeout_s)

    def close(self) -> None:
        """Fail what is left, wait for READs in flight, stop the thread; idempotent."""
        with self._changed:
            self._draining = self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S + STUCK_S)

    def healthy(self) -> str | None:
        """None when well, else why not."""
        if self._fault is None and not self._thread.is_alive():
            return "the decoder's thread has ended"
        silent_s = self._clock() - self._heartbeat
        if self._fault is None and silent_s > STUCK_S:
            return f"the decoder's step has not returned for {silent_s:.0f} s"
        return super().healthy()

    # Called on the engine's thread only.

    def _prepare(self, parts: EngineParts, kernels_s: float) -> None:
        if parts.device != "cpu":
            return  # its graphs were captured, which is a first call too
        if kernels_s:
            wait_for_builds(kernels_s)
        warm_up(parts.runner, self._prompts, parts.cross_pool, parts.self_pool)

    def _main(self, prepare: Callable[[], None], started: Future[None]) -> None:
        use_step_threads(self._settings.threads)
        if self.device == "cpu":
            let_encoder_go_first()
        try:
            prepare()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._heartbeat = self._clock()
                if not self.turn():
                    self._sleep(self.sleep_s())
            self._shut_down(WorkerDrainingError("this decoder was closed"))
        except Exception as error:  # no sequence's: of those `step` takes care
            logger.exception("the decoder failed")
            with self._changed:
                self._fault = f"{type(error).__name__}: {error}"
            self._shut_down(WorkerDrainingError(f"this decoder failed: {self._fault}"))

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _shut_down(self, error: WorkerDrainingError) -> None:
        """Answer what is left, then wait for READs: they write to pages of the importer's pool."""
        until = self._clock() + CLOSE_S
        while self._n_live and self._clock() < until:
            self._take_calls()
            self._loop.fail_all(error)
            if self._n_live:
                self._sleep(IDLE_S)
        if self._n_live:
            logger.error("ended with %d sequences that still held pages", self._n_live)
