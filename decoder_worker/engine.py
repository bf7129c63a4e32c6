"""The decoder worker's engine: requests enter by `submit`, results come as futures.

Its thread owns the device; other threads post calls to it, which run before the next step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from weakref import ref

from cluster.common.errors import (
    OverloadedError,
    UnsupportedValueError,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import PagePool
from cluster.common.messages import DecodeOptions, DecodeRequest, DecodeResult, WorkerLoad
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import use_step_threads
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.priorities import let_encoder_go_first
from cluster.common.settings import DecoderSettings
from cluster.common.signals import Backlogs
from decoder_worker.build import EngineParts, auto_batch, build_parts, warm_up
from decoder_worker.cpu.compiled import path_finder
from decoder_worker.loop import IDLE_S, Call, DecodeLoop
from decoder_worker.prompts import PromptBuilder
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState
from decoder_worker.stats import DecoderStats

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
STUCK_S = 60.0  # a step that takes longer is taken for a hang
CLOSE_S = 15.0  # how long close waits for READs in flight: longer than a READ may take


class DecoderCore:
    """An engine without weights and thread; whatever runs its loop makes the posted calls."""

    def __init__(
        self,
        parts: EngineParts,
        importer: KVImporter,
        prompts: PromptBuilder,
        settings: DecoderSettings,
        wake: Callable[[], object],
        beside: Callable[[Call], object],
        clock: Callable[[], float],
    ) -> None:
        """wake: called when the loop has something to do. clock: monotonic seconds.

        settings: with the batch's size filled in. beside: runs a call on a thread beside the
        loop's.
        """
        self._importer = importer
        self._pool = parts.cross_pool
        self._settings = settings
        self._prompts = prompts
        self._wake_up = wake
        self._clock = clock
        self._backlogs = Backlogs(clock)
        self._loop = DecodeLoop(importer, prompts, parts, self._post, beside, self._on_leave, clock)
        self._calls: deque[Call] = deque()  # what other threads ask for, in order
        self._lock = threading.RLock()  # guards the next five
        self._changed = threading.Condition(self._lock)
        self._n_live = 0  # submitted and not yet retired
        self._n_waiting = 0  # of those, without pages
        self._draining = False
        self._closing = False
        self._fault: str | None = None

    # Called from any thread.

    def submit(self, request: DecodeRequest) -> Future[DecodeResult]:
        """Accept a window into the waiting list; its handle's lease is renewed from here on.

        The future may be cancelled at any time. It raises errors of the handle and of its READ
        (WorkerError), DeadlineExceededError or SequenceFailedError.

        Raises:
            UnsupportedValueError: the model cannot do what the options ask.
            OverloadedError: the waiting list is full; the handle was not accepted.
            WorkerDrainingError: this replica takes nothing new.
        """
        options = request.options
        self._check(options)
        self._backlogs.hear(request)
        now = self._clock()
        sequence = DecodeSequence(
            request=request,
            future=Future(),
            arrived_s=now,
            deadline_s=now + request.remaining_s,
            n_new_max=self._prompts.n_new_max(options),
            language=self._prompts.known_language(options),
        )
        with self._lock:
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
        except Exception as error:
            self._on_leave(SequenceState.WAITING)
            self._on_leave(SequenceState.FINISHED)
            sequence.future.set_exception(error)
            return sequence.future
        self._post(partial(self._loop.scheduler.add, sequence))
        sequence.future.add_done_callback(partial(self._on_done, ref(sequence)))
        return sequence.future

    def begin_drain(self) -> None:
        with self._lock:
            self._draining = True

    def healthy(self) -> str | None:
        if self._fault is not None:
            return f"the decoder failed: {self._fault}"
        return self._importer.healthy()

    @property
    def n_live(self) -> int:
        return self._n_live

    def load(self) -> WorkerLoad:
        """Load by pages or by rows, whichever are scarcer. Cheaper than `stats`."""
        waiting = self._n_waiting + self._loop.scheduler.n_without_slots
        pool, most = self._pool, self._settings.max_batch
        capacity = max(1, min(most, pool.n_pages // pool.layout.pages_per_window))
        free = min(self._loop.scheduler.n_free_slots / most, pool.n_free / pool.n_pages)
        return WorkerLoad(capacity * (1.0 - free) + waiting, capacity)

    def stats(self) -> DecoderStats:
        pool, scheduler = self._pool, self._loop.scheduler
        read_ahead = scheduler.n_without_slots
        return DecoderStats(
            waiting=self._n_waiting + read_ahead,
            loading=max(0, scheduler.n_loading - read_ahead),
            running=scheduler.n_running,
            bulk_waiting=scheduler.n_bulk_waiting,
            bulk_running=scheduler.n_bulk,
            backlog=self._backlogs.total(bulk=False),
            bulk_backlog=self._backlogs.total(bulk=True),
            pages_free=pool.n_free,
            pages_total=pool.n_pages,
            pages_quarantined=self._importer.pool.n_quarantined,
            load=self.load(),
            **asdict(self._loop.counters),
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless nothing is live and every page and slot is back."""
        if self._n_live:
            raise RuntimeError(f"{self._n_live} sequences are live")
        self._loop.scheduler.check_integrity()

    def _check(self, options: DecodeOptions) -> None:
        self._prompts.check(options)
        most = self._settings.max_batch
        if options.n_rows > most:
            raise UnsupportedValueError(
                f"{options.n_rows} beams or candidates are more than the {most} rows of this "
                f"decoder's batch (decoder.max_batch)",
                param="beam_size" if options.beam_size > 1 else "best_of",
            )

    def _check_open(self) -> None:
        if self._fault is not None:
            raise WorkerDrainingError(f"this decoder failed: {self._fault}")
        if self._draining:
            raise WorkerDrainingError("this decoder is shutting down")

    def _post(self, call: Call) -> None:
        self._calls.append(call)
        self._loop.interrupt()
        self._wake_up()

    def _on_done(self, known: ref[DecodeSequence], future: Future[DecodeResult]) -> None:
        if future.cancelled() and (sequence := known()) is not None:
            self._post(partial(self._loop.cancel, sequence))

    # Called by whoever runs the loop.

    def turn(self) -> bool:
        """Run the posted calls and one step; False if nothing could run."""
        self._loop.listen()  # for calls that come from here on
        self._take_calls()
        return self._loop.step()

    def sleep_s(self) -> float:
        return self._loop.sleep_s()

    def _take_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _on_leave(self, state: SequenceState) -> None:
        with self._lock:
            if state is SequenceState.WAITING:
                self._n_waiting -= 1
            else:
                self._n_live -= 1
                self._changed.notify_all()


class DecoderEngine(DecoderCore):
    """Decodes windows by continuous batching; runs from its construction on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        importer: KVImporter,
        settings: DecoderSettings,
        *,
        kv_pool: PagePool | None = None,
        page_tokens: int = 0,
    ) -> None:
        """Load the weights, allocate the self-attention pool, start the thread and warm up.

        importer: closed by its owner, after the engine. kv_pool: for KV projected here from the
        encoder states that the importer reads; None: the importer reads KV. page_tokens: positions
        in a page of self-attention KV; 0 takes what suits the device. Raises CheckpointError, or
        ConfigurationError if importer, checkpoint and settings do not fit each other.
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
        self._beside = ThreadPoolExecutor(1, "decoder-words")  # its thread starts when it is used
        super().__init__(
            parts, importer, prompts, settings, self._wake.set, self._beside.submit, time.monotonic
        )
        self._heartbeat = self._clock()
        self._turn = threading.Condition()  # held by the thread whose turn it is
        self._is_hurried = False  # whether the turn is `_hurry`'s
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(parts, started), name="decoder-engine", daemon=True
        )
        self._thread.start()
        started.result()

    # Called from any thread.

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until all sequences ended; False if time ran out."""
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
        if self._fault is None and not self._thread.is_alive():
            return "the decoder's thread has ended"
        silent_s = self._clock() - self._heartbeat
        if self._fault is None and silent_s > STUCK_S:
            return f"the decoder's step has not returned for {silent_s:.0f} s"
        return super().healthy()

    # Called on the engine's thread only.

    def _main(self, parts: EngineParts, started: Future[None]) -> None:
        use_step_threads(self._settings.threads)
        with suppress(Exception):  # where it does not compile, texts with words fail
            path_finder()  # compiled now: later it would take Python's lock from steps
        try:
            if self.device == "cpu":  # on a GPU graphs were captured, which is a first call too
                hurry = threading.Thread(target=self._hurry, name="decoder-hurry", daemon=True)
                hurry.start()  # before this thread lowers the priority that it inherits
                let_encoder_go_first()
                warm_up(parts.runner, self._prompts, parts.cross_pool, parts.self_pool)
        except Exception as error:
            self._end_turns(f"it did not start: {error}")
            started.set_exception(error)
            return
        started.set_result(None)
        self._take_turns(hurries=False)
        if self._fault is None:
            self._shut_down(WorkerDrainingError("this decoder was closed"))
        else:  # one of its windows may be the cause, so this counts as a try
            self._shut_down(WorkerDiedError(f"this decoder failed: {self._fault}"))

    def _hurry(self) -> None:
        """Run turns at the encoder's priority while urgent sequences are among others."""
        use_step_threads(self._settings.threads)
        self._take_turns(hurries=True)

    def _take_turns(self, *, hurries: bool) -> None:
        try:
            with self._turn:
                while not self._closing and self._fault is None:
                    if self._is_hurried != hurries:
                        self._turn.wait()
                        continue
                    self._heartbeat = self._clock()
                    if not self.turn():
                        self._sleep(self.sleep_s())
                    if self.device == "cpu" and self._loop.is_hurried() != hurries:
                        self._is_hurried = not hurries
                        self._turn.notify()
        except Exception as error:  # `step` handles those of single sequences
            logger.exception("the decoder failed")
            self._end_turns(f"{type(error).__name__}: {error}")
        with self._turn:
            self._turn.notify()

    def _end_turns(self, fault: str) -> None:
        with self._turn, self._changed:
            self._fault = fault
            self._turn.notify()

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _shut_down(self, error: WorkerError) -> None:
        """Answer what is left, then wait for READs and word times, which use the pool's pages."""
        until = self._clock() + CLOSE_S
        while self._n_live and self._clock() < until:
            try:
                self._take_calls()
                self._loop.fail_all(error)
            except Exception:  # every waiter raises that a device is lost
                logger.exception("while the decoder ended")
                continue
            if self._n_live:
                self._sleep(IDLE_S)
        self._beside.shutdown(cancel_futures=True)
        if self._n_live:
            logger.error("ended with %d sequences that still held pages", self._n_live)
