"""What a worker reports of itself: its state, its load, and the signals that scale its pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.messages.shared import Role

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
    """What a worker reports of itself to those who choose a worker.

    work: windows in an encoder (a trimmed one counts by its share of a window's positions),
        hypotheses in a decoder, waiting ones included.
    capacity: of them that it works on at once; more only wait.
    window_s: encoder seconds for one window of all positions; 0 where there was none yet, and of a
        decoder.
    failed: it refuses all windows, and will be replaced; what it holds is little, therefore.
    """

    work: float = 0.0
    capacity: float = 1.0
    window_s: float = 0.0
    failed: bool = False

    def as_stats(self) -> dict[str, float]:
        """As Serve carries it."""
        return asdict(self)

    @classmethod
    def of_stats(cls, stats: Mapping[str, Any]) -> WorkerLoad:
        """The reverse of `as_stats`; the defaults for a worker that has reported nothing yet."""
        given: dict[str, Any] = {
            name: float(stats[name]) for name in cls.__slots__ if name in stats
        }
        return cls(**given | {"failed": bool(given.get("failed"))})


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
