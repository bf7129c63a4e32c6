"""The encoder engine without its weights and threads: it queues windows and reports its state.

Threads run its loops in a worker, and a virtual clock runs them in a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from cluster.common.errors import InvalidAudioError, WorkerDrainingError
from cluster.common.kernels.gpu.self_check import turned_off
from cluster.common.messages import (
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    WINDOW_FRAMES,
    WINDOW_SAMPLES,
    CrossKVHandle,
    EncodeReply,
    EncodeRequest,
    Priority,
    WorkerLoad,
    WorkerStatus,
)
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.signals import NO_SLACK_S, Backlogs, EncoderSignals
from encoder_worker.batcher import Batcher, QueuedWindow
from encoder_worker.loop import EncodeLoop
from encoder_worker.publisher import Counts, Publisher

UNKNOWN_WINDOW_S = 0.2  # assumed until the first window was measured
SHUTTING_DOWN = "this encoder worker is shutting down"


@dataclass(slots=True, kw_only=True)
class EncoderStats(Counts):
    """Counts since the start, and the present state."""

    queued: int  # without windows that wait for a duplicate's KV
    queued_audio_s: float
    running: int
    slack_s: float  # least time until the deadline of a queued window
    leases: int
    read: float  # leased pages, in whole windows; a page with several leases counts once
    pages_free: int  # includes kept pages without readers
    pages_total: int
    windows_exported: int  # as many as the pool can hold
    load: WorkerLoad
    queued_work: float  # here and in routers, in the unit of `WorkerLoad.work`
    queued_bulk: float  # the same of bulk windows, which `queued_work` excludes
    kept: int  # published windows without readers
    kept_bytes: int  # of their pages
    evicted: int  # kept windows whose pages were taken for others

    def signals(self, busy: float, bulk_busy: float = 0.0) -> EncoderSignals:
        window_s = self.load.window_s or UNKNOWN_WINDOW_S
        return EncoderSignals(
            busy,
            self.queued_work * window_s,
            min(self.slack_s, NO_SLACK_S),
            self.read / self.windows_exported,
            bulk_busy,
            self.queued_bulk * window_s,
        )

    def as_status(self, **worker: Any) -> WorkerStatus:
        return WorkerStatus(
            role="encoder",
            **worker,
            pages_free=self.pages_free,
            pages_total=self.pages_total,
            queued=self.queued,
            running=self.running,
            extra={
                "cached_windows": float(self.kept),
                "cache_hits": float(self.hits),
                "cache_misses": float(self.misses),
                "cache_evictions": float(self.evicted),
            },
            turned_off=dict(turned_off),
        )


class EncoderCore:
    def __init__(self, publisher: Publisher, loops: Sequence[EncodeLoop], n_audio_ctx: int) -> None:
        self._publisher = publisher
        self._exporter = publisher.exporter
        self._loops = tuple(loops)
        urgent, later, bulk = loops[0], loops[len(loops) // 2], loops[-1]
        self._lanes: dict[Priority, EncodeLoop] = {
            "live": urgent,
            "interactive": urgent,
            "later": later,
            "bulk": bulk,
        }
        self._queues = [loop.batcher for loop in loops]
        self._backlogs = Backlogs(publisher.clock)
        self._n_audio_ctx = n_audio_ctx
        self._draining = False
        self._closing = False
        self._failure: str | None = None

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        """Queue one window, or answer it at once from the kept KV of the same audio.

        Cancelling the future takes the window out of the queue, or ends the lease if one was just
        given. The future fails with DeadlineExceededError when the window's time runs out first,
        and with SequenceFailedError when this window cannot be encoded.

        Raises:
            InvalidAudioError: the samples are not what `EncodeRequest` promises.
            OverloadedError: too many windows of its class wait here.
            WorkerDrainingError: the engine takes nothing new, or has failed.
        """
        check_request(request, self._n_audio_ctx)
        if self._draining or self._closing:
            raise WorkerDrainingError(SHUTTING_DOWN)
        if reason := self.healthy():
            raise WorkerDrainingError(reason)  # another worker can take it
        self._backlogs.hear(request)
        future: Future[EncodeReply] = Future()
        key = self._publisher.key_of(request)
        if (reply := self._publisher.find(request, key, 0.0)) is not None:
            future.set_result(reply)
            return future
        loop = self._lanes[request.priority]
        self._will_queue(loop)
        window = loop.batcher.put(request, future, key)
        future.add_done_callback(partial(_drop_cancelled, loop.batcher, ref(window)))
        if self._closing or self._failure:  # the queue may have been emptied since the check
            loop.fail_queued(WorkerDrainingError(self._failure or SHUTTING_DOWN))
        return future

    def revoke(self, handle: CrossKVHandle) -> bool:
        """Free the pages of a reply that nobody will use; False if they are free already."""
        return self._exporter.revoke(handle.lease)

    def load(self) -> WorkerLoad:
        """The load of `stats` alone, since it is asked for often."""
        work = sum(queue.work for queue in self._queues)
        known = [loop.window_s for loop in self._loops if loop.window_s]
        window_s = min(known, default=0.0)  # the others include waits for more urgent work
        return WorkerLoad(work, self._loops[0].max_batch, window_s)

    def stats(self) -> EncoderStats:
        queues, exporter = self._queues, self._exporter
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
            load=self.load(),
            queued_work=self._queued(bulk=False),
            queued_bulk=self._queued(bulk=True),
            kept=exporter.n_kept,
            kept_bytes=exporter.n_kept_pages * exporter.pool.page_bytes,
            evicted=exporter.n_evicted,
            **asdict(self._publisher.counts()),
        )

    def _queued(self, *, bulk: bool) -> float:
        here = sum(queue.queued_work(bulk=bulk) for queue in self._queues)
        return here + self._backlogs.total(bulk=bulk)

    def healthy(self) -> str | None:
        return self._failure or self._exporter.healthy()

    def begin_drain(self) -> None:
        self._draining = True

    def is_idle(self) -> bool:
        is_busy = any(len(queue) or queue.n_in_flight for queue in self._queues)
        return not (is_busy or self._exporter.n_leases)

    def _will_queue(self, loop: EncodeLoop) -> None:
        """Called before a window is put into this loop's queue; an engine starts its thread."""


def _drop_cancelled(
    batcher: Batcher, known: ref[QueuedWindow], future: Future[EncodeReply]
) -> None:
    """Take a cancelled window out; a strong reference to it would be a cycle with its audio."""
    if future.cancelled() and (window := known()) is not None:
        batcher.cancel(window)


def check_request(request: EncodeRequest, n_audio_ctx: int) -> None:
    """Raise InvalidAudioError unless samples and context fit `EncodeRequest`."""
    pcm, file_mel, context = request.pcm, request.file_mel, request.context
    n_samples, shortest, longest = pcm.size, 1, WINDOW_SAMPLES
    fits = pcm.dtype == np.int16 and pcm.ndim == 1 and 0 <= context <= n_audio_ctx
    if file_mel is not None:
        n_before, n_frames = file_mel.n_before, file_mel.n_frames
        fits = fits and n_before % HOP_LENGTH == 0 and 0 <= n_before <= MEL_CONTEXT_SAMPLES
        fits = fits and 1 <= n_frames <= WINDOW_FRAMES and math.isfinite(file_mel.log_max)
        shortest, longest = n_before + 1, n_before + n_frames * HOP_LENGTH + MEL_CONTEXT_SAMPLES
    if context:
        longest = min(longest, context * SAMPLES_PER_POSITION)
    if not fits or not shortest <= n_samples <= longest:
        raise InvalidAudioError(
            f"a window of {pcm.dtype} {list(pcm.shape)} does not fit {file_mel} and a context of "
            f"{context} positions"
        )
