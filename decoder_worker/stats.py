"""A snapshot of a decoder engine, for metrics, routing and /health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.common.kernels.gpu.self_check import turned_off
from cluster.common.messages import WorkerLoad, WorkerStatus
from cluster.common.signals import DecoderSignals


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

    waiting, loading, running: sequences in each state. Waiting ones include new arrivals, and those
        whose KV is read before there are rows for them.
    bulk_*: the part that is bulk work. backlog, bulk_backlog: rows that wait in routers, as in
        `cluster.common.signals`. pages_*: of the cross-attention pool.
    """

    waiting: int
    loading: int
    running: int
    bulk_waiting: int
    bulk_running: int
    backlog: float
    bulk_backlog: float
    pages_free: int
    pages_total: int
    pages_quarantined: int
    load: WorkerLoad

    @property
    def transfer_gb_per_s(self) -> float:
        """10^9 bytes per second of READs with the check of their generation; 0 before the first."""
        return self.transfer_bytes / self.transfer_s / 1e9 if self.transfer_s else 0.0

    def signals(self) -> DecoderSignals:
        load, waiting = self.load, self.waiting
        used = max(0.0, load.work - waiting - self.bulk_running)
        others = max(0, waiting - self.bulk_waiting) + self.backlog
        bulk = self.bulk_waiting + self.bulk_backlog
        shares = (used, others, float(self.bulk_running), bulk)
        return DecoderSignals(*(share / load.capacity for share in shares))

    def as_status(self, **worker: Any) -> WorkerStatus:
        return WorkerStatus(
            role="decoder",
            **worker,
            pages_free=self.pages_free,
            pages_total=self.pages_total,
            queued=self.waiting + self.loading,
            running=self.running,
            extra={
                "pages_quarantined": self.pages_quarantined,
                "transfer_gb_per_s": round(self.transfer_gb_per_s, 3),
            },
            turned_off=dict(turned_off),
        )
