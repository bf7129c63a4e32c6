"""What an encoder engine counts, and the snapshot that it shows."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import WorkerStatus


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """A moment's state, and counts since the start."""

    queued: int
    queued_audio_s: float
    running: int
    leases: int
    pages_free: int
    pages_total: int
    batches: int
    windows: int
    failed: int  # expired ones included
    expired: int
    encode_s: float  # of all batches
    sends_states: bool  # the next batch is handed over as encoder states

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
            extra={"sends_states": float(self.sends_states)},
        )


@dataclass(slots=True)
class Counts:
    """Since the start; written by the engine's thread only."""

    batches: int = 0
    windows: int = 0
    failed: int = 0
    expired: int = 0
    encode_s: float = 0.0

    def add_batch(self, n_windows: int, encode_s: float) -> None:
        self.batches += 1
        self.windows += n_windows
        self.encode_s += encode_s
