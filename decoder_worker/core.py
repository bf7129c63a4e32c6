"""A decoder engine without its weights and its thread: how windows come in, and its state.

Windows come in by `submit`, and the loop hears of them by calls that are posted to whoever runs it:
a thread in `decoder_worker.engine`, and in a simulation a virtual clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from weakref import ref

from cluster.common.errors import OverloadedError, UnsupportedValueError, WorkerDrainingError
from cluster.common.kv.importer import KVImporter
from cluster.common.messages import DecodeOptions, DecodeRequest, DecodeResult, OnToken, WorkerLoad
from cluster.common.settings import DecoderSettings
from decoder_worker.build import EngineParts
from decoder_worker.loop import Call, DecodeLoop
from decoder_worker.prompts import PromptBuilder
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState
from decoder_worker.stats import DecoderStats, load_of

RETRY_AFTER_S = 1.0


class DecoderCore:
    """Takes windows, and tells what is there; the parts belong together."""

    def __init__(
        self,
        parts: EngineParts,
        importer: KVImporter,
        prompts: PromptBuilder,
        settings: DecoderSettings,
        wake: Callable[[], object],
        clock: Callable[[], float],
        may_run_bulk: Callable[[], bool] = lambda: True,
        more_bulk: Callable[[], bool] = lambda: False,
    ) -> None:
        """wake: called when whoever runs the loop has something to do.

        may_run_bulk, more_bulk: as in `DecodeLoop`.

        settings: with the batch's size filled in. clock: monotonic seconds.
        """
        self._importer = importer
        self._pool = parts.cross_pool
        self._settings = settings
        self._prompts = prompts
        self._wake_up = wake
        self._clock = clock
        self._loop = DecodeLoop(
            importer,
            prompts,
            parts.runner,
            parts.scheduler,
            parts.projection,
            self._post,
            self._on_leave,
            parts.steps_ahead,
            clock,
            may_run_bulk,
            more_bulk,
        )
        self._calls: deque[Call] = deque()  # what other threads ask for, in order
        self._lock = threading.RLock()  # guards the next five
        self._changed = threading.Condition(self._lock)
        self._n_live = 0  # submitted and not yet retired
        self._n_waiting = 0  # of those, without pages
        self._draining = False
        self._closing = False
        self._fault: str | None = None

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
        self._post(partial(self._loop.add, sequence))
        sequence.future.add_done_callback(partial(self._on_done, ref(sequence)))
        return sequence.future

    def begin_drain(self) -> None:
        """Take nothing new from now on."""
        with self._lock:
            self._draining = True

    def healthy(self) -> str | None:
        """None when well, else why not."""
        if self._fault is not None:
            return f"the decoder failed: {self._fault}"
        return self._importer.healthy()

    @property
    def n_live(self) -> int:
        """Sequences that were submitted and hold something still."""
        return self._n_live

    def load(self) -> WorkerLoad:
        """That of `stats`, without all that makes up the rest: large pools ask for it often."""
        pool, scheduler = self._pool, self._loop.scheduler
        return load_of(
            self._n_waiting + scheduler.n_without_slots,
            (pool.n_free, pool.n_pages, pool.layout.pages_per_window),
            (scheduler.n_free_slots, self._settings.max_batch),
        )

    def stats(self) -> DecoderStats:
        pool, scheduler = self._pool, self._loop.scheduler
        read_ahead = scheduler.n_without_slots
        return DecoderStats(
            waiting=self._n_waiting + read_ahead,
            loading=max(0, scheduler.n_loading - read_ahead),
            running=scheduler.n_running,
            pages_free=pool.n_free,
            pages_total=pool.n_pages,
            pages_quarantined=self._importer.pool.n_quarantined,
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
        """Have a call made before the next step."""
        self._calls.append(call)
        self._loop.interrupt()
        self._wake_up()

    def _on_done(self, known: ref[DecodeSequence], future: Future[DecodeResult]) -> None:
        if future.cancelled() and (sequence := known()) is not None:
            self._post(partial(self._loop.cancel, sequence))

    # Called by whoever runs the loop.

    def turn(self) -> bool:
        """Take what was posted, and make one step; False when nothing could run."""
        self._loop.listen()  # for calls that come from here on
        self._take_calls()
        return self._loop.step()

    def sleep_s(self) -> float:
        """How long to wait for the next call after a turn in which nothing could run."""
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
