"""The decoder worker's engine: requests in by `submit`, answers out by futures, from any thread.

It owns a thread, and that thread owns the device: whatever other threads want of a sequence is
posted to it as a call, and made before the next step. What a step is, `decoder_worker.loop` says.
Knows nothing of Serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial

from cluster.errors import OverloadedError, UnsupportedValueError, WorkerDrainingError
from cluster.jit.background import wait_for_builds
from cluster.kv.payloads import HandoffImporter
from cluster.messages import DecodeOptions, DecodeRequest, DecodeResult, OnToken
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import use_step_threads
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.settings import DecoderSettings
from decoder_worker.build import EngineParts, build_parts
from decoder_worker.loop import IDLE_S, Call, DecodeLoop
from decoder_worker.prompts import PromptBuilder
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState
from decoder_worker.stats import DecoderStats
from decoder_worker.warm_up import warm_up

logger = logging.getLogger(__name__)

STUCK_S = 60.0  # a step that takes longer is taken for a hang
CLOSE_S = 15.0  # how long close waits for READs in flight: longer than a READ may take
RETRY_AFTER_S = 1.0
CPU_ROWS = 16
MOST_GPU_ROWS = 64  # more gain next to nothing


def auto_batch(device: str) -> int:
    """Rows where the settings leave it open, and nobody has looked at the memory."""
    return CPU_ROWS if device == "cpu" else MOST_GPU_ROWS


class DecoderEngine:
    """Decodes windows by continuous batching. Made once per replica, running from then on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        importer: HandoffImporter,
        settings: DecoderSettings,
        *,
        page_tokens: int = 0,
        kernels_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the weights, allocate the self-attention pool, start the thread and warm up.

        Args:
            importer: stays its owner's, who closes it after the engine.
            page_tokens: positions in a page of self-attention KV; 0 takes what suits the device.
            kernels_s: how long to wait for a CPU's compiled kernels before that.
            clock: monotonic seconds, of deadlines and of what is measured.

        Raises:
            ConfigurationError: importer, checkpoint and settings do not fit each other.
            CheckpointError: the weights cannot be loaded.
        """
        if not settings.max_batch:
            rows = auto_batch(importer.pool.device.type)
            settings = settings.model_copy(update={"max_batch": rows})
        tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        parts = build_parts(checkpoint, tokenizer, importer, settings, page_tokens)
        self.device = parts.device
        self.transport = importer.transport
        self._importer = importer
        self._settings = settings
        self._prompts = PromptBuilder(tokenizer, checkpoint.dims)
        self._loop = DecodeLoop(
            importer,
            self._prompts,
            parts.runner,
            parts.scheduler,
            self._post,
            self._on_leave,
            parts.steps_ahead,
            clock,
        )
        self._clock = clock
        self._calls: deque[Call] = deque()  # what other threads ask for, in order
        self._wake = threading.Event()
        self._changed = threading.Condition()  # guards the next five
        self._n_live = 0  # submitted and not yet retired
        self._n_waiting = 0  # of those, without pages
        self._draining = False
        self._closing = False
        self._fault: str | None = None
        self._heartbeat = self._clock()
        started: Future[None] = Future()
        prepare = partial(self._prepare, parts, kernels_s)
        self._thread = threading.Thread(
            target=self._main, args=(prepare, started), name="decoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

    # Called from any thread.

    def submit(
        self, request: DecodeRequest, on_token: OnToken | None = None
    ) -> Future[DecodeResult]:
        """Accept a window into the waiting list; its handle's lease is renewed from here on.

        The future may be cancelled at any time: whatever the sequence holds comes back.

        Args:
            on_token: called on the engine's thread with each token as it is sampled; only for one
                attempt of one row, whose tokens nothing takes back.

        Raises:
            UnsupportedValueError: the model cannot do what the options ask.
            OverloadedError: the waiting list is full; the handle was not accepted.
            WorkerDrainingError: this replica takes nothing new.

        The future raises errors of the handle and of its READ (WorkerError), a
        DeadlineExceededError, or a SequenceFailedError.
        """
        options = request.options
        self._check(options, on_token)
        now = self._clock()
        sequence = DecodeSequence(
            request=request,
            future=Future(),
            arrived=now,
            deadline=now + request.remaining_s,
            n_new_max=self._prompts.n_new_max(options),
            language=self._prompts.known_language(options),
            on_token=on_token,
        )
        with self._changed:
            self._check_open()
            if self._n_waiting >= self._settings.max_waiting:
                raise OverloadedError(
                    f"{self._n_waiting} windows wait for this decoder, the most it takes",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._n_waiting += 1
            self._n_live += 1
        try:
            self._importer.accept(request.handle)
            pool = self._importer.pool_for(request.handle)
            sequence.landing_pool = pool if pool is not self._importer.pool else None
        except Exception as error:
            self._on_leave(SequenceState.WAITING)
            self._on_leave(SequenceState.FINISHED)
            sequence.future.set_exception(error)
            return sequence.future
        self._post(partial(self._loop.add, sequence))
        sequence.future.add_done_callback(partial(self._on_done, sequence))
        return sequence.future

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until all sequences ended; False when time ran out."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._n_live == 0, timeout_s)

    def close(self) -> None:
        """Fail what is left, wait for READs in flight, stop the thread; idempotent."""
        with self._changed:
            self._draining = self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S + STUCK_S)

    def healthy(self) -> str | None:
        """None when well, else why not."""
        if self._fault is not None:
            return f"the decoder failed: {self._fault}"
        if not self._thread.is_alive():
            return "the decoder's thread has ended"
        silent_s = self._clock() - self._heartbeat
        if silent_s > STUCK_S:
            return f"the decoder's step has not returned for {silent_s:.0f} s"
        return self._importer.healthy()

    def stats(self) -> DecoderStats:
        pool, scheduler = self._importer.pool, self._loop.scheduler
        read_ahead = scheduler.n_without_slots
        return DecoderStats(
            waiting=self._n_waiting + read_ahead,
            loading=max(0, scheduler.n_loading - read_ahead),
            running=scheduler.n_running,
            pages_free=pool.n_free,
            pages_total=pool.n_pages,
            pages_quarantined=pool.n_quarantined,
            pages_per_window=pool.layout.pages_per_window,
            slots_free=scheduler.n_free_slots,
            slots_total=self._settings.max_batch,
            **asdict(self._loop.counters),
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless nothing is live and every page and slot is back."""
        if self._n_live:
            raise RuntimeError(f"{self._n_live} sequences are live")
        self._loop.scheduler.check_integrity()
        if landing := self._importer.landing_pool:
            landing.check_integrity()

    def _check(self, options: DecodeOptions, on_token: OnToken | None) -> None:
        self._prompts.check(options)
        most = self._settings.max_batch
        if options.n_rows > most:
            raise UnsupportedValueError(
                f"{options.n_rows} beams or candidates are more than the {most} rows of this "
                f"decoder's batch (decoder.max_batch)",
                param="beam_size" if options.beam_size > 1 else "best_of",
            )
        if on_token is not None and (options.n_rows > 1 or len(options.temperatures) > 1):
            raise UnsupportedValueError(
                "tokens can only be streamed without fallback, beams and candidates", param="stream"
            )

    def _check_open(self) -> None:
        if self._fault is not None:
            raise WorkerDrainingError(f"this decoder failed: {self._fault}")
        if self._draining:
            raise WorkerDrainingError("this decoder is shutting down")

    def _post(self, call: Call) -> None:
        """Have the engine's thread make a call."""
        self._calls.append(call)
        self._wake.set()

    def _on_done(self, sequence: DecodeSequence, future: Future[DecodeResult]) -> None:
        if future.cancelled():
            self._post(partial(self._loop.cancel, sequence))

    # Called on the engine's thread only.

    def _prepare(self, parts: EngineParts, kernels_s: float) -> None:
        if parts.device != "cpu":
            return  # its graphs were captured, which is a first call too
        if kernels_s:
            wait_for_builds(kernels_s)
        warm_up(parts.runner, self._prompts, self._importer.pool, parts.self_pool)

    def _main(self, prepare: Callable[[], None], started: Future[None]) -> None:
        use_step_threads(self._settings.threads)
        try:
            prepare()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._heartbeat = self._clock()
                self._take_calls()
                if not self._loop.step():
                    self._sleep(self._loop.sleep_s())
            self._shut_down(WorkerDrainingError("this decoder was closed"))
        except Exception as error:  # no sequence's: of those `step` takes care
            logger.exception("the decoder failed")
            with self._changed:
                self._fault = f"{type(error).__name__}: {error}"
            self._shut_down(WorkerDrainingError(f"this decoder failed: {self._fault}"))

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _take_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _on_leave(self, state: SequenceState) -> None:
        with self._changed:
            if state is SequenceState.WAITING:
                self._n_waiting -= 1
            else:
                self._n_live -= 1
                self._changed.notify_all()

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
