"""What waits for a worker's pool in other processes, as their calls tell it.

Windows wait where the order is decided, which is not where workers are counted. So each call
carries what waits behind it: for each class, a process's backlog over the workers that it knows.
Summed over the workers of a pool this is all that waits. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.common.messages import DecodeRequest, EncodeRequest, Priority

HEARD_S = 10.0  # for which a backlog counts: who has one still has told a new one by then


@dataclass(frozen=True, slots=True)
class Backlog:
    """windows: in the unit of `WorkerLoad.work`."""

    windows: float
    heard_s: float


class Backlogs:
    """What one worker has heard of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, Priority], Backlog] = {}

    def hear(self, request: EncodeRequest | DecodeRequest) -> None:
        self._heard[request.sender, request.priority] = Backlog(request.backlog, self._clock())

    def total(self, *, bulk: bool) -> float:
        """Of bulk work, or of all other."""
        since_s = self._clock() - HEARD_S
        self._heard = {key: one for key, one in self._heard.items() if one.heard_s > since_s}
        return sum(
            one.windows
            for (_, priority), one in self._heard.items()
            if (priority == "bulk") == bulk
        )
