"""An event loop whose time is virtual: where it would wait, its time moves on at once.

Everything that waits through the loop follows it: sleeps, timeouts, timers. It asks the system for
no time. A simulation runs on `SimulationLoop`, which asks it for nothing at all: only tasks and
timers of the loop itself may run there. Tests also use `VirtualTimeLoop`, where sockets and pipes
may become ready.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

from cluster.clock import Clock

T = TypeVar("T")
Args = TypeVarTuple("Args")
STANDS_STILL = "every task waits, and for no time: nothing would ever happen"


class _VirtualSelector(selectors.SelectSelector):
    """Never waits for a timer: it adds the time of the wait to `now_s`."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is None or timeout > 0 else timeout)
        if not ready:
            if timeout is None:
                raise RuntimeError(STANDS_STILL)
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class _Due(list[Any]):
    """In the place of asyncio's `Handle`, which takes several times as long to make.

    Its callback, arguments, context and time; empty once it is cancelled.
    """

    __slots__ = ()

    cancel = list.clear

    def cancelled(self) -> bool:
        return not self

    def when(self) -> float:
        when_s: float = self[3]
        return when_s


class SimulationLoop(asyncio.SelectorEventLoop):
    """The same without the system, for many timers: most are deadlines, which are cancelled.

    asyncio's own loop compares timers by a method in Python and keeps cancelled ones for long;
    with hundreds of requests a second that is a fifth of a simulation. What raises in a callback
    ends the run: nothing here may fail.
    """

    _ready: deque[Any]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Due]] = []
        self._n_timers = 0  # of all time: what is due at the same time runs in this order

    def time(self) -> float:
        return self._now_s

    get_debug = staticmethod(bool)  # False; each future asks for it

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> Any:
        if context is None:
            context = copy_context()
        due = _Due((callback, args, context, self._now_s))
        self._ready.append(due)
        return due

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> Any:
        if context is None:
            context = copy_context()
        due = _Due((callback, args, context, when))
        self._n_timers += 1
        heappush(self._timers, (when, self._n_timers, due))
        return due

    def _run_once(self) -> None:
        """Rounds until it is stopped: what is ready, and if nothing is, what is due next."""
        timers, ready = self._timers, self._ready
        is_last = False
        while not is_last:
            while timers and not timers[0][2]:
                heappop(timers)
            is_last = self._stopping
            if not ready and not is_last:
                if not timers:
                    raise RuntimeError(STANDS_STILL)
                self._now_s = max(self._now_s, timers[0][0])
            while timers and timers[0][0] <= self._now_s:
                due = heappop(timers)[2]
                if due:
                    ready.append(due)
            for _ in range(len(ready)):
                due = ready.popleft()
                if due:
                    due[2].run(due[0], *due[1])
            is_last = is_last or self._stopping

    _stopping: bool


def run_virtually(
    work: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = VirtualTimeLoop,
) -> T:
    """Run `work` to its end on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)


def virtual_clock(random: Random | int = 0) -> Clock:
    """The clock of the running loop, with chance that a seed decides."""
    chance = Random(random) if isinstance(random, int) else random
    return Clock(asyncio.get_running_loop().time, asyncio.sleep, chance)
