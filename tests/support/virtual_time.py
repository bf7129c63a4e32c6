"""An event loop whose time is virtual: where it would wait, its time moves on at once.

Everything that waits through the loop follows it: sleeps, timeouts, timers. A test that uses it has
no threads and no sockets to wait for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

from cluster.clock import Clock

T = TypeVar("T")


class VirtualSelector(selectors.SelectSelector):
    """Never waits for a timer: it adds the time of the wait to `now_s`."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is None or timeout > 0 else timeout)
        if not ready:
            assert timeout is not None, "all tasks wait, and for no time"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_clock(seed: int = 0) -> Clock:
    """The clock of the running loop, with chance that a seed decides."""
    return Clock(asyncio.get_running_loop().time, asyncio.sleep, Random(seed))
