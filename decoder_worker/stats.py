"""What a decoder engine reports of itself: a snapshot for metrics, routing and /health."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.messages import DecoderSignals, WorkerLoad, WorkerStatus


@dataclass(slots=True)
class Counters:
    """Totals since the start; only the engine's thread writes them."""

    steps: int = 0
    step_s: float = 0.0
    tokens: int = 0
    prefills: int = 0
    prefill_s: float = 0.0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    fallbacks: int = 0  # attempts beyond a sequence's first
    doubted: int = 0  # sequences whose trimmed context did not suffice


@dataclass(slots=True, kw_only=True)
class DecoderStats(Counters):
    """Totals, and the state at this moment.

    waiting, loading, running: sequences in each state (arrivals not yet taken are waiting, and so
        are those whose KV is read before there are rows for them).
    pages_*: of the cross-attention pool.
    slots_*: rows of the batch; a sequence has one for each of its hypotheses.
    """

    waiting: int
    loading: int
    running: int
    pages_free: int
    pages_total: int
    pages_quarantined: int
    pages_per_window: int
    slots_free: int
    slots_total: int

    @property
    def transfer_gb_per_s(self) -> float:
        """10^9 bytes per second of a READ, the check of its generation included; 0: none yet."""
        return self.transfer_bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0

    @property
    def load(self) -> WorkerLoad:
        """Whichever of pages and slots there is less of."""
        pages = (self.pages_free, self.pages_total, self.pages_per_window)
        return load_of(self.waiting, pages, (self.slots_free, self.slots_total))

    def signals(self) -> DecoderSignals:
        load, waiting = self.load, self.waiting
        return DecoderSignals((load.work - waiting) / load.capacity, waiting / load.capacity)

    def as_status(
        self, *, replica: str, model: str, transport: str, device: str, healthy: bool
    ) -> WorkerStatus:
        """What the worker tells the router of itself."""
        return WorkerStatus(
            replica=replica,
            role="decoder",
            healthy=healthy,
            model=model,
            transport=transport,
            device=device,
            pages_free=self.pages_free,
            pages_total=self.pages_total,
            queued=self.waiting + self.loading,
            running=self.running,
            extra={
                "pages_quarantined": self.pages_quarantined,
                "transfer_gb_per_s": round(self.transfer_gb_per_s, 3),
            },
        )


def load_of(waiting: int, pages: tuple[int, int, int], slots: tuple[int, int]) -> WorkerLoad:
    """By pages (free, in all, of a window) or slots (free, in all), whichever there is less of."""
    pages_free, pages_total, pages_per_window = pages
    slots_free, slots_total = slots
    capacity = max(1, min(slots_total, pages_total // pages_per_window))
    free = min(slots_free / slots_total, pages_free / pages_total)
    return WorkerLoad(capacity * (1.0 - free) + waiting, capacity)
