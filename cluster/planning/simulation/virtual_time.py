"""An event loop whose time is virtual: where it would wait, its time moves on at once.

Everything that waits through the loop follows it: sleeps, timeouts, timers. It asks the system for
nothing, neither for time nor for sockets, so nothing but tasks of this loop may run in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

from cluster.clock import Clock

T = TypeVar("T")


class _VirtualSelector(selectors.SelectSelector):
    """Never waits and finds nothing: it adds the time of the wait to `now_s`."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation stands still: every task waits, and for no time")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_clock(random: Random) -> Clock:
    """The clock of the running loop, with chance that a seed decides."""
    return Clock(asyncio.get_running_loop().time, asyncio.sleep, random)
