"""The encoder engine's loop: takes windows, encodes them into pages and publishes them.

Where the forward is asynchronous, the next batch, if it is full, is launched before this one is
waited for. No window holds a page before it is encoded, so a full export pool stops the loop, which
is the backpressure that reaches the client. A window that cannot be encoded or published fails
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.common.errors import DeadlineExceededError
from cluster.common.failed_batches import run_alone
from cluster.common.kv.pool import Pages
from cluster.common.messages import WINDOW_SAMPLES, EncodeTimings
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.priorities import SHARES, leaves_room
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.forward import WindowEncoder
from encoder_worker.gpu.static_encoder import Wait, already_done
from encoder_worker.publisher import Publisher

IDLE_WAIT_S = 0.25  # between two looks for expired windows
EMPTY_WAIT_S = 1.0  # the same with an empty queue; a new window ends the wait
PAGE_WAIT_S = 0.05  # the same while the loop waits for pages
# Contexts that are warmed: of windows of 2.6 to 5.1 s and the usual slack behind them. The first
# window of a context takes up to twice the time, and a warmed context takes 5 MB.
USUAL_CONTEXTS = range(256, 321)
USUAL_SLACK = 64
RECENT = 0.2  # weight of the newest batch in `window_s`


@dataclass(slots=True)
class _Batch:
    windows: list[QueuedWindow]
    reserved: list[Pages]
    started_s: float = 0.0
    wait: Wait = already_done


@dataclass(slots=True)
class _Found:
    """When the device was last found done; shared by loops that take turns on it."""

    done_s: float = 0.0


class EncodeLoop:
    """All methods run on the lane's thread, but for `fail_queued` and `stop`."""

    def __init__(
        self,
        batcher: Batcher,
        publisher: Publisher,
        forward: WindowEncoder,
        max_batch: int,
        *,
        blocks: bool = True,  # wait for windows and pages here; else the caller comes again
        beside: EncodeLoop | None = None,  # of another thread, takes turns on the device
    ) -> None:
        self.batcher = batcher
        self.forward = forward
        self.window_s = 0.0  # recent time for a window of all positions; 0 before the first
        self.turned_s = publisher.clock()  # when the thread last came back from the device
        self._publisher = publisher
        self._exporter = publisher.exporter
        self._recorder = publisher.recorder
        self._clock = publisher.clock
        self.max_batch = max_batch
        self._blocks = blocks
        self._launched: _Batch | None = None
        self._running: list[QueuedWindow] = []
        self._found: _Found = _Found() if beside is None else beside._found
        self._stopping = False

    def warm_up(self) -> None:
        """Encode a window of each usual shape, so that no request pays for a first product."""
        silence = np.zeros(WINDOW_SAMPLES, dtype=np.int16)
        layout, pool, reserved = self._exporter.layout, self._exporter.pool.tensor, self._reserve(1)
        assert reserved, "nothing else has pages yet"
        try:
            self.forward.prepare(pool, self.max_batch)
            self.forward([silence], pool, reserved)()
            for context in self.forward.contexts_to_warm:
                if context in USUAL_CONTEXTS:
                    n_heard = (context - USUAL_SLACK) * SAMPLES_PER_POSITION
                    noise = (np.arange(n_heard) % 251).astype(np.int16)  # so that rows differ
                    written = reserved[0][: layout.pages_for(context)]
                    self.forward([noise], pool, [written], context=context)()
        finally:
            self._exporter.abandon(reserved[0])

    def step(self) -> None:
        """Wait for a batch, then encode until none is ready."""
        self.begin()
        while self.has_launched:
            self.go_on()

    @property
    def has_launched(self) -> bool:
        return self._launched is not None

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def begin(self) -> None:
        """Wait for a batch and launch it, if there are pages for it."""
        self.turned_s = self._clock()
        wait_s = IDLE_WAIT_S if len(self.batcher) else EMPTY_WAIT_S
        wait_s = PAGE_WAIT_S if self._hold() else wait_s
        n_ready = self.batcher.wait(wait_s if self._blocks else 0.0)
        self._fail_expired()
        if n_ready:
            self._launched = self._take(n_ready, PAGE_WAIT_S if self._blocks else 0.0)

    def _hold(self) -> bool:
        """Hold back classes that must leave the rest of the pool free; True if there are any."""
        exporter = self._exporter
        n_pages, wanted = exporter.pool.n_pages, exporter.layout.pages_per_window
        used = n_pages - exporter.n_free_pages
        held = [one for one in SHARES if not leaves_room(used, wanted, n_pages, SHARES[one])]
        self.batcher.hold(held)
        return bool(held)

    def go_on(self) -> None:
        """Launch the next batch if it is full, then wait for the launched one and publish it."""
        launched = self._launched
        assert launched is not None
        self.turned_s = self._clock()
        self._fail_expired()
        self._hold()
        # A full batch computes while this one is published; one that is not full may still grow.
        full = self.forward.is_async and self.batcher.has_full_batch
        goes_on = full and not self._stopping
        following = self._take(self.max_batch, 0.0) if goes_on else None
        try:
            launched.wait()
        except Exception as error:
            self._encode_alone(launched, error)
        else:
            self._publish_all(launched)
        self._launched = following

    def stop(self) -> None:
        self._stopping = True
        self.batcher.wake()

    def fail_all(self, error: Exception) -> None:
        """Fail every window, running ones included; called after the loop has ended."""
        for window in self._running:
            self._publisher.fail(window, error)
        self.fail_queued(error)

    def fail_queued(self, error: Exception) -> None:
        for window in self.batcher.clear():
            self._publisher.fail(window, error)

    def _take(self, n_windows: int, page_wait_s: float) -> _Batch | None:
        """Launch the next windows, as many as there are pages for; None if none can go."""
        exporter = self._exporter
        reserved = self._reserve(n_windows, page_wait_s)
        popped = self.batcher.pop(len(reserved))
        self._running += popped  # so that `fail_all` finds them
        # The KV of some may have been published since they came.
        answered = [window for window in popped if self._publisher.share(window)]
        self._finish(answered)
        windows = [window for window in popped if window not in answered]
        for unused in reserved[len(windows) :]:
            exporter.abandon(unused)
        if not windows:
            return None
        n_pages = exporter.layout.pages_for(windows[0].request.context or exporter.layout.n_frames)
        own = reserved[: len(windows)]
        for pages in own:
            if surplus := pages[n_pages:]:
                exporter.abandon(surplus)
        batch = _Batch(windows, [pages[:n_pages] for pages in own])
        try:
            self._launch(batch)
        except Exception as error:
            self._encode_alone(batch, error)
            return None
        return batch

    def _reserve(self, n_windows: int, wait_s: float = PAGE_WAIT_S) -> list[Pages]:
        """Reserve pages for up to `n_windows` windows; waits only for the first window's."""
        n_pages = self._exporter.layout.pages_per_window
        reserved: list[Pages] = []
        while len(reserved) < n_windows:
            pages = self._exporter.reserve(n_pages, 0.0 if reserved else wait_s)
            if pages is None:
                break
            reserved.append(pages)
        return reserved

    def _launch(self, batch: _Batch) -> None:
        batch.started_s = self._clock()
        requests = [window.request for window in batch.windows]
        pcm = [request.pcm for request in requests]
        file_mels = [request.file_mel for request in requests]
        pool, context = self._exporter.pool.tensor, requests[0].context
        batch.wait = self.forward(pcm, pool, batch.reserved, file_mels, context)

    def _encode_alone(self, batch: _Batch, error: Exception) -> None:
        """Encode the windows of a failed batch one by one, so that only the culprits fail."""

        def encode(one: _Batch) -> None:
            self._launch(one)
            one.wait()

        def give_up(one: _Batch, error: Exception) -> None:
            self._publisher.give_up(one.windows[0], one.reserved[0], error)
            self._finish(one.windows)

        pairs = zip(batch.windows, batch.reserved, strict=True)
        alone = [_Batch([window], [pages]) for window, pages in pairs]
        for one, _ in run_alone(error, alone, encode, give_up):
            self._publish_all(one)

    def _publish_all(self, batch: _Batch) -> None:
        n_windows, now = len(batch.windows), self._clock()
        # Without the wait behind an earlier batch, whose end a loop beside this one may have seen.
        encode_s = max(0.0, now - max(batch.started_s, self._found.done_s))
        self._found.done_s = max(self._found.done_s, now)
        work = sum(window.work for window in batch.windows)
        bulk = sum(window.work for window in batch.windows if window.priority == "bulk")
        window_s = encode_s / work
        self.window_s += (window_s - self.window_s) * (RECENT if self.window_s else 1.0)
        self._publisher.count(
            batches=1, windows=n_windows, encode_s=encode_s, bulk_s=bulk * window_s
        )
        self._recorder.observe("splitscribe_encode_seconds", encode_s)
        self._recorder.observe("splitscribe_encoder_batch_windows", n_windows)
        for window, pages in zip(batch.windows, batch.reserved, strict=True):
            queue_s = batch.started_s - window.arrived_s
            self._recorder.observe("splitscribe_encoder_queue_seconds", queue_s)
            timings = EncodeTimings(queue_s, encode_s, n_windows)
            self._publisher.publish(window, pages, timings, self.batcher)
        self._finish(batch.windows)

    def _finish(self, windows: list[QueuedWindow]) -> None:
        self._running = [window for window in self._running if window not in windows]
        self.batcher.finish(windows)

    def _fail_expired(self) -> None:
        for window in self.batcher.expire():
            self._publisher.count(expired=1)
            self._publisher.fail(
                window, DeadlineExceededError("no encoder had room for it in time")
            )
