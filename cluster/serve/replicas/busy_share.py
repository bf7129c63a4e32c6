"""The share of the last few seconds in which something worked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class BusyShare:
    """Made from a total of seconds worked that somebody else counts."""

    def __init__(self, over_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._over_s = over_s
        self._clock = clock
        self._totals: deque[tuple[float, float]] = deque()  # when, total

    def share(self, total_s: float) -> float:
        """total_s: worked by now, since the start."""
        now_s = self._clock()
        self._totals.append((now_s, total_s))
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= self._over_s:
            self._totals.popleft()
        since_s, before_s = self._totals[0]
        return min(1.0, (total_s - before_s) / (now_s - since_s)) if now_s > since_s else 0.0
