"""An event loop with virtual time: instead of waiting it advances its clock.

It replaces the clock and the selector, which are public parts of asyncio.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

from cluster.common.clock import Clock

T = TypeVar("T")
STANDS_STILL = "every task waits, and for no time: nothing would ever happen"


class _VirtualSelector(selectors.SelectSelector):
    """Adds the timeout to `now_s` instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # With nothing but the loop's own pipe, only another thread could make something ready.
        is_alone = timeout is not None and len(self.get_map()) == 1
        ready = [] if is_alone else super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError(STANDS_STILL)
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_clock(random: Random | int = 0) -> Clock:
    chance = Random(random) if isinstance(random, int) else random
    return Clock(asyncio.get_running_loop().time, asyncio.sleep, chance)
