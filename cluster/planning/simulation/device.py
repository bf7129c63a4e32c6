"""A device that takes seconds and computes nothing, and the clock of the worker that waits for it.

An engine's step is a call that returns when the device is done. On a virtual clock it returns at
once, and the worker's own clock is ahead of the loop's by what the step would have taken. All that
a step decides it decides at its beginning, so this is exact; what it hands out is given to others
when the loop's clock has come so far (`cluster.planning.simulation.worker`).
"""

from __future__ import annotations

from collections.abc import Callable


class WorkerClock:
    """Monotonic seconds of one thread of a worker."""

    def __init__(self, now: Callable[[], float]) -> None:
        """now: the time of the event loop."""
        self._loop_now = now
        self._ahead_to_s = 0.0

    def now(self) -> float:
        now_s, ahead_to_s = self._loop_now(), self._ahead_to_s
        return now_s if now_s > ahead_to_s else ahead_to_s  # quicker than max()

    def wait_until(self, at_s: float) -> None:
        """The thread waits for the device until then."""
        self._ahead_to_s = max(self._ahead_to_s, at_s)


class Device:
    """Does one thing after another, in the order in which they are launched.

    busy_s: of all that was launched. The roles of a colocated worker have one device together.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._free_at_s = 0.0

    def launch(self, now_s: float, seconds: float) -> float:
        """When something is done that is launched now and takes so long."""
        self._free_at_s = max(now_s, self._free_at_s) + seconds
        self.busy_s += seconds
        return self._free_at_s
