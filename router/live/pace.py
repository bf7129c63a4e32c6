"""How often the sessions of a process are updated, and when there is no room for more sessions.

Long updates mean that the workers have too much to do. Then the hop, which is the time from one
update of a session to the next, grows for all sessions, so that they cost less. New sessions are
refused only when the hop is at its maximum and updates still take longer. Open sessions go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import SYSTEM_CLOCK, Clock
from router.live.interface import Delay

# Share of a hop that an update may take. Of so many sessions a quarter is being updated at a time:
# enough to keep the workers busy, and words wait no longer for others' updates than that.
MAX_UPDATE_SHARE = 0.25
NEW_WEIGHT = 0.1  # weight of a new measurement in the mean
FRESH_S = 10.0  # age up to which a measurement still describes the load


@dataclass(frozen=True, slots=True)
class DelayProfile:
    """What one value of `delay` means.

    hold_s: seconds at the end of the audio in which no word is confirmed. hop_s: shortest hop.
    """

    hold_s: float
    hop_s: float


DELAY_PROFILES: dict[Delay, DelayProfile] = {
    "minimal": DelayProfile(0.3, 0.5),
    "low": DelayProfile(0.5, 0.5),
    "medium": DelayProfile(0.5, 1.0),
    "high": DelayProfile(0.8, 1.0),
    "xhigh": DelayProfile(0.8, 2.0),
}
DEFAULT_DELAY: Delay = "low"


class Pace:
    """Chooses the hop, in seconds of a session's audio, by the mean duration of updates."""

    def __init__(self, min_hop_s: float, max_hop_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._min_s = min_hop_s
        self._max_s = max_hop_s
        self._clock = clock
        self._mean_s = 0.0
        self._measured_s = 0.0  # time of the last measurement

    @property
    def update_s(self) -> float:
        """Mean duration of recent updates of all sessions; 0 if there was none in the last 10 s."""
        is_fresh = self._clock.monotonic() - self._measured_s < FRESH_S
        return self._mean_s if is_fresh else 0.0

    @property
    def hop_s(self) -> float:
        """The hop that the load asks for."""
        return min(max(self.update_s / MAX_UPDATE_SHARE, self._min_s), self._max_s)

    def hop_for(self, profile: DelayProfile) -> float:
        """The hop of a session whose `delay` may ask for a longer one."""
        return min(max(self.hop_s, profile.hop_s), max(self._max_s, profile.hop_s))

    @property
    def is_overloaded(self) -> bool:
        """Whether updates take longer than the longest hop."""
        return self.update_s > self._max_s

    def record(self, seconds: float) -> None:
        """Take the duration of an update that was answered or overtaken."""
        mean_s = self.update_s or seconds
        self._mean_s = mean_s + NEW_WEIGHT * (seconds - mean_s)
        self._measured_s = self._clock.monotonic()
