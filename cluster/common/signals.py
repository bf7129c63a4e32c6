"""What workers report for the number of workers, with what waits for them in other processes.

Windows wait where the order is decided, which is not where workers are counted. So each call
carries what waits behind it: for each class, a process's backlog over the workers that it knows.
Summed over the workers of a pool this is all that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.common.messages import Priority, WindowRequest

HEARD_S = 10.0  # for which a backlog counts: who has one still has told a new one by then
NO_SLACK_S = 3600.0  # of a queue without windows
UNREAD = 0.5  # of an export pool: from here on its encoder waits for decoders


@dataclass(frozen=True, slots=True)
class EncoderSignals:
    """What one encoder reports to the autoscaler.

    busy: share of the last seconds that it worked. queue_s: seconds of its work that wait, there
    and in routers. slack_s: the least time that a waiting window has left. unread: share of its
    export pool that no decoder has read yet. bulk_*: of bulk work, which the others leave out.
    """

    busy: float = 0.0
    queue_s: float = 0.0
    slack_s: float = NO_SLACK_S
    unread: float = 0.0
    bulk_busy: float = 0.0
    bulk_queue_s: float = 0.0

    def with_bulk(self) -> EncoderSignals:
        """The same where bulk work counts as any other."""
        busy, queue_s = self.busy + self.bulk_busy, self.queue_s + self.bulk_queue_s
        return replace(self, busy=busy, queue_s=queue_s, bulk_busy=0.0, bulk_queue_s=0.0)

    @property
    def is_starved(self) -> bool:
        """Its windows wait because no decoder reads what it has published."""
        return self.queue_s > 0 and self.unread >= UNREAD


@dataclass(frozen=True, slots=True)
class DecoderSignals:
    """What one decoder reports to the autoscaler, as shares of its capacity.

    used: pages or rows in use; waiting: what does not fit beside them, there and in routers.
    """

    used: float = 0.0
    waiting: float = 0.0
    bulk_used: float = 0.0
    bulk_waiting: float = 0.0

    def with_bulk(self) -> DecoderSignals:
        return DecoderSignals(self.used + self.bulk_used, self.waiting + self.bulk_waiting)


@dataclass(frozen=True, slots=True)
class Backlog:
    """windows: in the unit of `WorkerLoad.work`."""

    windows: float
    heard_s: float


class Backlogs:
    """What one worker has heard of late. Not thread-safe."""

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
