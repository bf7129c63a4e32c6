"""What workers report to the autoscaler, including what waits for them in other processes.

Windows wait in routers, while workers are counted in Serve. So each call tells a worker, for each
class, its sender's backlog divided by the number of workers that the sender knows. Summed over a
pool's workers this is all that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.common.messages import Priority, WindowRequest

HEARD_S = 10.0  # for which a backlog counts; by then its sender has told a new one
NO_SLACK_S = 3600.0  # of an empty queue
UNREAD = 0.5  # share of an export pool from which on its encoder waits for decoders


@dataclass(frozen=True, slots=True)
class EncoderSignals:
    """What one encoder reports; the bulk_* fields count bulk work, which the others exclude."""

    busy: float = 0.0  # share of the last seconds that it worked
    queue_s: float = 0.0  # seconds of its work that wait, there and in routers
    slack_s: float = NO_SLACK_S  # least time until the deadline of a waiting window
    unread: float = 0.0  # share of its export pool that no decoder has read yet
    bulk_busy: float = 0.0
    bulk_queue_s: float = 0.0

    def with_bulk(self) -> EncoderSignals:
        """The same with bulk work counted as any other."""
        busy, queue_s = self.busy + self.bulk_busy, self.queue_s + self.bulk_queue_s
        return replace(self, busy=busy, queue_s=queue_s, bulk_busy=0.0, bulk_queue_s=0.0)

    @property
    def is_starved(self) -> bool:
        """Whether windows wait because no decoder reads what was published."""
        return self.queue_s > 0 and self.unread >= UNREAD


@dataclass(frozen=True, slots=True)
class DecoderSignals:
    """What one decoder reports, as shares of its capacity."""

    used: float = 0.0  # pages or rows in use
    waiting: float = 0.0  # what does not fit beside them, there and in routers
    bulk_used: float = 0.0
    bulk_waiting: float = 0.0

    def with_bulk(self) -> DecoderSignals:
        return DecoderSignals(self.used + self.bulk_used, self.waiting + self.bulk_waiting)


@dataclass(frozen=True, slots=True)
class Backlog:
    windows: float  # in the unit of `WorkerLoad.work`
    heard_s: float


class Backlogs:
    """What one worker has heard recently. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, Priority], Backlog] = {}

    def hear(self, request: WindowRequest) -> None:
        self._heard[request.sender, request.priority] = Backlog(request.backlog, self._clock())

    def total(self, *, bulk: bool) -> float:
        since_s = self._clock() - HEARD_S
        self._heard = {key: one for key, one in self._heard.items() if one.heard_s > since_s}
        return sum(
            one.windows
            for (_, priority), one in self._heard.items()
            if (priority == "bulk") == bulk
        )
