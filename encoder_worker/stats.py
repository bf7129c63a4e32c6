"""What an encoder engine counts, and the snapshot that it shows."""

from __future__ import annotations

from dataclasses import dataclass


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
