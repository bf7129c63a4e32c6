"""A token bucket: so much at once, and so much per second over a longer time."""

from __future__ import annotations


class Budget:
    """What one connection may still do. May be overdrawn; what is spent then is owed in time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._at_s: float | None = None  # of the last spending

    def spend(self, amount: float, now_s: float) -> float:
        """Take `amount`. Returns the seconds until the budget has it: 0.0 where it had it."""
        earned = 0.0 if self._at_s is None else (now_s - self._at_s) * self._per_s
        self._left = min(self._left + earned, self._burst) - amount
        self._at_s = now_s
        return max(0.0, -self._left / self._per_s)
