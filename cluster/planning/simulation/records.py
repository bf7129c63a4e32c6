"""What is noted while a simulation runs: how each request ended, and what was decided why."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cluster.messages import Priority


@dataclass(frozen=True, slots=True)
class Noted:
    """A decision, or something that happened to the cluster."""

    at_s: float
    what: str
    why: str


@dataclass(slots=True)
class Answers:
    """Requests of one class, as columns, in the order in which they were answered.

    audio_s and latency_s of those that got a transcript, with their arrival.
    """

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    audio_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    failed_at_s: array[float] = field(default_factory=lambda: array("d"))
    failures: dict[str, int] = field(default_factory=dict)  # by status and code


@dataclass(slots=True)
class Moment:
    """The cluster at one second: shares of 0 to 1, and counts."""

    at_s: float
    encoders: int
    decoders: int
    encoder_busy: float
    decoder_busy: float
    encoder_pages: float
    decoder_pages: float
    encoder_queue: float
    decoder_waiting: int
    pending: int


@dataclass(slots=True)
class Records:
    """All of one simulation."""

    answers: dict[Priority, Answers] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)  # of windows, by reason
    n_requests: int = 0

    def answered(self, priority: Priority, at_s: float, audio_s: float, latency_s: float) -> None:
        told = self._of(priority)
        told.arrived_s.append(at_s)
        told.audio_s.append(audio_s)
        told.latency_s.append(latency_s)

    def failed(self, priority: Priority, at_s: float, reason: str) -> None:
        told = self._of(priority)
        told.failed_at_s.append(at_s)
        told.failures[reason] = told.failures.get(reason, 0) + 1

    def note(self, at_s: float, what: str, why: str) -> None:
        self.noted.append(Noted(round(at_s, 3), what, why))

    def _of(self, priority: Priority) -> Answers:
        return self.answers.setdefault(priority, Answers())
