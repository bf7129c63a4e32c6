"""What an encoder engine counts, and the snapshot that it shows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.common.messages import NO_SLACK_S, EncoderSignals, WorkerLoad, WorkerStatus

UNKNOWN_WINDOW_S = 0.2  # before the first
RECENT = 0.2  # what the newest batch counts for in `window_s`


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What is kept now, and what came of windows that had a key since the start.

    kept, kept_bytes: windows that nobody reads, and their pages. hits: windows that needed no
    encode; misses: windows encoded. evicted: windows whose pages were needed for others.
    """

    kept: int = 0
    kept_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """A moment's state, and counts since the start."""

    queued: int  # without those that wait for another one's KV
    queued_audio_s: float
    running: int
    slack_s: float  # least time that a queued window has left
    leases: int
    read: float  # windows of all positions under leases, of which each may have several
    pages_free: int  # kept ones that nobody reads included
    pages_total: int
    windows_exported: int  # at most, at a time
    batches: int
    windows: int
    failed: int  # expired ones included
    expired: int
    encode_s: float  # of all batches; times in which two overlap count once
    window_s: float  # of that for one window of all positions, of late
    work: float  # of the queued and running windows, as in `WorkerLoad`
    queued_work: float  # of the queued ones
    reuse: ReuseStats

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(self.work, window_s=self.window_s)

    def signals(self, busy: float) -> EncoderSignals:
        """busy: as in `EncoderSignals`."""
        return EncoderSignals(
            busy,
            self.queued_work * (self.window_s or UNKNOWN_WINDOW_S),
            min(self.slack_s, NO_SLACK_S),
            self.read / self.windows_exported,
        )

    def as_status(
        self, *, replica: str, model: str, transport: str, device: str, healthy: bool
    ) -> WorkerStatus:
        """What the worker tells the router of itself."""
        return WorkerStatus(
            replica=replica,
            role="encoder",
            healthy=healthy,
            model=model,
            transport=transport,
            device=device,
            pages_free=self.pages_free,
            pages_total=self.pages_total,
            queued=self.queued,
            running=self.running,
            extra={
                "cached_windows": float(self.reuse.kept),
                "cache_hits": float(self.reuse.hits),
                "cache_misses": float(self.reuse.misses),
                "cache_evictions": float(self.reuse.evicted),
            },
        )


@dataclass(slots=True)
class Counts:
    """Since the start; written by the engine's thread, and `failed` by any through `add_failed`."""

    batches: int = 0
    windows: int = 0
    failed: int = 0
    expired: int = 0
    encode_s: float = 0.0
    window_s: float = 0.0

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_failed(self) -> None:
        with self._lock:
            self.failed += 1

    def add_batch(self, n_windows: int, work: float, encode_s: float) -> None:
        """work: as in `WorkerLoad`."""
        self.batches += 1
        self.windows += n_windows
        self.encode_s += encode_s
        window_s = encode_s / work
        self.window_s += (window_s - self.window_s) * (RECENT if self.window_s else 1.0)


def total(lanes: Sequence[Counts]) -> Counts:
    """What several lanes counted; what a window takes is told by the first that has encoded."""
    return Counts(
        batches=sum(one.batches for one in lanes),
        windows=sum(one.windows for one in lanes),
        failed=sum(one.failed for one in lanes),
        expired=sum(one.expired for one in lanes),
        encode_s=sum(one.encode_s for one in lanes),
        window_s=next((one.window_s for one in lanes if one.window_s), 0.0),
    )
