"""How often sessions are updated, by how long updates take; and when there is no room for more.

One for all sessions of a process. An update that takes long means that the workers have too much to
do: then everybody's updates become rarer, and cost less. Only when they are as rare as they may be,
and still take long, new sessions are refused; sessions that are there go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import SYSTEM_CLOCK, Clock
from router.live.interface import Delay

SHARE = 0.5  # of the time between two updates that one may take
MEMORY = 0.1  # of a new measurement in the mean
FRESH_S = 10.0  # how long a measurement says something about the load


@dataclass(frozen=True, slots=True)
class Patience:
    """What a `delay` stands for.

    hold_s: audio at the end whose words are not certain. hop_s: least time between updates.
    """

    hold_s: float
    hop_s: float


PATIENCE: dict[Delay, Patience] = {
    "minimal": Patience(0.3, 0.5),
    "low": Patience(0.5, 0.5),
    "medium": Patience(0.5, 1.0),
    "high": Patience(0.8, 1.0),
    "xhigh": Patience(0.8, 2.0),
}
USUAL: Delay = "low"


class Pace:
    """The time between two updates of a session, in seconds of its audio."""

    def __init__(self, min_hop_s: float, max_hop_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._min_s = min_hop_s
        self._max_s = max_hop_s
        self._clock = clock
        self._mean_s = 0.0
        self._measured_s = 0.0  # when

    @property
    def update_s(self) -> float:
        """Mean time of the last updates of all sessions; 0 where there was none lately."""
        is_fresh = self._clock.monotonic() - self._measured_s < FRESH_S
        return self._mean_s if is_fresh else 0.0

    @property
    def hop_s(self) -> float:
        """What the load asks for."""
        return min(max(self.update_s / SHARE, self._min_s), self._max_s)

    def hop_for(self, patience: Patience) -> float:
        """What a session gets, which may want updates to be rarer."""
        return min(max(self.hop_s, patience.hop_s), max(self._max_s, patience.hop_s))

    @property
    def is_overloaded(self) -> bool:
        """Whether updates take longer than they may be apart at most."""
        return self.update_s > self._max_s

    def took(self, seconds: float) -> None:
        """Note the time of an update that was answered, or given up."""
        mean_s = self.update_s or seconds
        self._mean_s = mean_s + MEMORY * (seconds - mean_s)
        self._measured_s = self._clock.monotonic()
