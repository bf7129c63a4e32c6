"""What the encoder engine's thread does: take windows, encode them into pages, publish.

Per batch it reserves export pages, launches log-mel, encoder and cross K/V into the pages, waits,
and publishes. On a GPU, and on a CPU once its kernels are built, the next batch, if it is full, is
launched before this one is waited for. No window holds a page before it is encoded; a full export
pool stops the loop until pages come free, which is the backpressure that reaches the client.
A window that cannot be encoded or published fails alone. How a window gets its answer is the
business of `encoder_worker.publisher`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.common.errors import ConfigurationError, DeadlineExceededError
from cluster.common.failed_batches import run_alone
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.pool import Pages
from cluster.common.messages import WINDOW_SAMPLES, EncodeTimings
from cluster.common.metrics import Recorder
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.priorities import leaves_room
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.forward import WindowEncoder
from encoder_worker.gpu.static_encoder import Ready
from encoder_worker.publisher import KVReuse, Publisher, as_worker_error
from encoder_worker.stats import Counts

IDLE_WAIT_S = 0.25  # how long the loop sleeps before it looks for expired windows
EMPTY_WAIT_S = 1.0  # and with an empty queue; a new window wakes it
# Positions of usual short windows, of 2.6 to 5.1 s by the usual slack, which hears nothing. The
# first window of a context takes up to twice the time; to have had it takes 5 MB.
USUAL_CONTEXTS = range(256, 321)
USUAL_SLACK = 64
PAGE_WAIT_S = 0.05  # how long it waits for pages before it looks for expired windows again


@dataclass(frozen=True, slots=True)
class _Batch:
    """Windows of one context, and the pages that each of them will fill.

    n_frames: encoder positions that each of them gets.
    """

    n_frames: int
    windows: list[QueuedWindow]
    reserved: list[Pages]

    @property
    def context(self) -> int:
        return self.windows[0].request.context

    @property
    def work(self) -> float:
        """In windows of all positions."""
        return sum(window.request.work for window in self.windows)

    def one_by_one(self) -> list[_Batch]:
        pairs = zip(self.windows, self.reserved, strict=True)
        return [_Batch(self.n_frames, [window], [pages]) for window, pages in pairs]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that the device works on, or has done."""

    batch: _Batch
    started_s: float
    ready: Ready


class EncodeLoop:
    """All methods run on the engine's thread, but for `fail_queued`.

    clock: monotonic seconds, the batcher's.
    blocks: wait for windows and pages here; else the caller comes again when there are some.
    """

    def __init__(
        self,
        batcher: Batcher,
        exporter: KVExporter,
        reuse: KVReuse,
        forward: WindowEncoder,
        max_batch: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        *,
        blocks: bool = True,
    ) -> None:
        self.counts = Counts()
        self.forward = forward
        self._batcher = batcher
        self._exporter = exporter
        self._publisher = Publisher(batcher, exporter, reuse, self.counts, recorder, clock)
        self._max_batch = max_batch
        self._recorder = recorder
        self._clock = clock
        self._blocks = blocks
        self._launched: _Launched | None = None
        self._running: list[QueuedWindow] = []
        self._done_s = 0.0  # when the device was last found done
        self._stopping = False

    def warm_up(self) -> None:
        """One window of silence, so that the first request does not pay for first calls.

        Products are chosen by their shapes: so one of each usual context, too.
        """
        silence = np.zeros(WINDOW_SAMPLES, dtype=np.int16)
        pool, reserved = self._exporter.pool.tensor, self._reserve(1, PAGE_WAIT_S)
        if not reserved:
            raise ConfigurationError("the export pool has no free page at start")
        try:
            self.forward.prepare(pool, self._max_batch)
            self.forward([silence], pool, reserved).wait()
            self._warm_contexts(reserved[0])
        finally:
            self._exporter.abandon(reserved[0])

    def _warm_contexts(self, pages: Pages) -> None:
        exporter = self._exporter
        for context in self.forward.contexts_to_warm:
            if context in USUAL_CONTEXTS:
                n_heard = (context - USUAL_SLACK) * SAMPLES_PER_POSITION
                noise = (np.arange(n_heard) % 251).astype(np.int16)  # rows are not all alike
                written = pages[: exporter.layout.pages_for(context)]
                self.forward([noise], exporter.pool.tensor, [written], context=context).wait()

    def step(self) -> None:
        """Wait for a batch, then encode until none is ready."""
        self.begin()
        while self.has_launched:
            self.go_on()

    @property
    def has_launched(self) -> bool:
        """Whether the device has a batch that `go_on` is to wait for."""
        return self._launched is not None

    def begin(self) -> None:
        """Wait for a batch and launch it, if there are pages for it."""
        leaves_room = self._leaves_room()
        self._batcher.hold_bulk(not leaves_room)
        wait_s = IDLE_WAIT_S if len(self._batcher) else EMPTY_WAIT_S
        wait_s = wait_s if leaves_room else PAGE_WAIT_S
        n_ready = self._batcher.wait(wait_s if self._blocks else 0.0)
        self._fail_expired()
        if n_ready:
            self._launched = self._take(n_ready, PAGE_WAIT_S if self._blocks else 0.0)

    def go_on(self) -> None:
        """Wait for the batch that is launched and publish it; before that launch the next one.

        The device goes on with a full batch while the host publishes this one. A batch that is not
        full has nothing to gain from an early start: it may still grow.
        """
        launched = self._launched
        assert launched is not None
        self._fail_expired()
        full = self.forward.is_async and self._batcher.has_full_batch
        goes_on = full and not self._stopping
        following = self._take(self._max_batch, 0.0) if goes_on else None
        self._complete(launched)
        self._launched = following

    def stop(self) -> None:
        """Take no further batch; from any thread."""
        self._stopping = True
        self._batcher.wake()

    def fail_all(self, error: Exception) -> None:
        """Fail every window, those on the device too; after the loop has ended."""
        for window in self._running:
            self._publisher.fail(window, error)
        self.fail_queued(error)

    def fail_queued(self, error: Exception) -> None:
        """From any thread."""
        for window in self._batcher.clear():
            self._publisher.fail(window, error)

    def _take(self, n_windows: int, page_wait_s: float) -> _Launched | None:
        """Launch the next windows, as many as there are pages for; None when that is none."""
        exporter = self._exporter
        reserved = self._reserve(n_windows, page_wait_s)
        popped = self._batcher.pop(len(reserved))
        self._running += popped  # from here on `fail_all` knows them
        windows = self._without_published(popped)
        for surplus in reserved[len(windows) :]:  # windows were cancelled meanwhile
            exporter.abandon(surplus)
        if not windows:
            return None
        n_frames = windows[0].request.context or exporter.layout.n_frames
        own = [self._without_surplus(pages, n_frames) for pages in reserved[: len(windows)]]
        batch = _Batch(n_frames, windows, own)
        try:
            return self._launch(batch)
        except Exception as error:
            self._encode_alone(batch, error)
            return None

    def _reserve(self, n_windows: int, wait_s: float) -> list[Pages]:
        """Pages for as many windows as there is room for; waits for the first."""
        n_pages = self._exporter.layout.pages_per_window
        reserved: list[Pages] = []
        while len(reserved) < n_windows:
            pages = self._exporter.reserve(n_pages, 0.0 if reserved else wait_s)
            if pages is None:
                break
            reserved.append(pages)
        return reserved

    def _without_surplus(self, pages: Pages, n_frames: int) -> Pages:
        """Of a whole window's pages those that `n_frames` take; the others are free again."""
        n_pages = self._exporter.layout.pages_for(n_frames)
        if surplus := pages[n_pages:]:
            self._exporter.abandon(surplus)
        return pages[:n_pages]

    def _leaves_room(self) -> bool:
        """Whether a bulk window may take pages; those that nobody reads must not fill the pool."""
        n_pages, wanted = self._exporter.pool.n_pages, self._exporter.layout.pages_per_window
        return leaves_room(n_pages - self._exporter.n_free_pages, wanted, n_pages)

    def _without_published(self, windows: list[QueuedWindow]) -> list[QueuedWindow]:
        """Answer those whose KV was published between their arrival and now; the others."""
        answered = [window for window in windows if self._publisher.share(window)]
        self._finish(answered)
        return [window for window in windows if window not in answered]

    def _launch(self, batch: _Batch) -> _Launched:
        started_s = self._clock()
        pcm = [window.request.pcm for window in batch.windows]
        file_mels = [window.request.file_mel for window in batch.windows]
        pool = self._exporter.pool.tensor
        ready = self.forward(pcm, pool, batch.reserved, file_mels, batch.context)
        return _Launched(batch, started_s, ready)

    def _complete(self, launched: _Launched) -> None:
        """Wait for a batch and publish it."""
        try:
            launched.ready.wait()
        except Exception as error:
            self._encode_alone(launched.batch, error)
        else:
            self._publish_all(launched)

    def _encode_alone(self, batch: _Batch, error: Exception) -> None:
        """Encode the windows of a batch that raised one by one, so that only the culprits fail."""
        for _, launched in run_alone(error, batch.one_by_one(), self._encode, self._give_up):
            self._publish_all(launched)

    def _encode(self, batch: _Batch) -> _Launched:
        launched = self._launch(batch)
        launched.ready.wait()
        return launched

    def _give_up(self, batch: _Batch, error: Exception) -> None:
        for window, pages in zip(batch.windows, batch.reserved, strict=True):
            self._exporter.abandon(pages)
            self._publisher.fail(window, as_worker_error(error))
        self._finish(batch.windows)

    def _publish_all(self, launched: _Launched) -> None:
        batch, now = launched.batch, self._clock()
        encode_s = now - max(launched.started_s, self._done_s)  # not while it stood behind another
        self._done_s = now
        self.counts.add_batch(len(batch.windows), batch.work, encode_s)
        self._recorder.observe("splitscribe_encode_seconds", encode_s)
        self._recorder.observe("splitscribe_encoder_batch_windows", len(batch.windows))
        for window, pages in zip(batch.windows, batch.reserved, strict=True):
            queue_s = launched.started_s - window.arrived_s
            self._recorder.observe("splitscribe_encoder_queue_seconds", queue_s)
            timings = EncodeTimings(queue_s, encode_s, len(batch.windows))
            self._publisher.publish(window, pages, timings)
        self._finish(batch.windows)

    def _finish(self, windows: list[QueuedWindow]) -> None:
        self._running = [window for window in self._running if window not in windows]
        self._batcher.finish(windows)

    def _fail_expired(self) -> None:
        for window in self._batcher.expire():
            self.counts.expired += 1
            self._publisher.fail(
                window, DeadlineExceededError("no encoder had room for it in time")
            )
