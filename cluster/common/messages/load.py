"""What a worker reports of itself: its state, its load, and the signals that scale its pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.common.messages.shared import Role

NO_SLACK_S = 3600.0  # of a queue without windows
UNREAD = 0.5  # of an export pool: from here on its encoder waits for decoders


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's state, for /health.

    of_workers: how many the pool has, where only some were asked; 0: all were.
    """

    replica: str
    role: Role
    healthy: bool
    model: str
    transport: str
    device: str
    pages_free: int
    pages_total: int
    queued: int
    running: int
    extra: dict[str, float] = field(default_factory=dict)
    of_workers: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with each answer, for the choice of a worker.

    work: windows in an encoder (a trimmed one counts by its share of a window's positions),
        hypotheses in a decoder, waiting ones included.
    capacity: of them that a decoder works on at once, more only wait; 0 of an encoder, and where it
        is not known.
    window_s: encoder seconds for one window of all positions; 0 where there was none yet, and of a
        decoder.
    """

    work: float = 0.0
    capacity: float = 0.0
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EncoderSignals:
    """What one encoder reports to the autoscaler.

    busy: share of the last seconds that it worked. queue_s: seconds of its work that wait.
    slack_s: the least time that a waiting window has left. unread: share of its export pool that
    no decoder has read yet.
    """

    busy: float = 0.0
    queue_s: float = 0.0
    slack_s: float = NO_SLACK_S
    unread: float = 0.0

    @property
    def is_starved(self) -> bool:
        """Its windows wait because no decoder reads what it has published."""
        return self.queue_s > 0 and self.unread >= UNREAD


@dataclass(frozen=True, slots=True)
class DecoderSignals:
    """What one decoder reports to the autoscaler, as shares of its capacity.

    used: pages or rows in use; waiting: what does not fit beside them.
    """

    used: float = 0.0
    waiting: float = 0.0
