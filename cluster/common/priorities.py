"""Which class of windows goes next where windows of several classes wait for the same thing.

Live windows go before those of short interactive requests, these before those of longer ones, and
all before bulk ones. No class starves: when `PASSED_BY` windows of more urgent classes have gone
while one of a class waited, its turn is next. Windows of long requests leave some room to short
ones, and bulk work leaves more (`SHARES`).

Where a CPU computes, bulk work runs in idle threads: the operating system takes the core away from
them within microseconds when anybody else wants it. Linux shares cores out between sessions first
(`kernel.sched_autogroup_enabled`), so all that belongs to one server is in one session.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import get_args

from cluster.common.messages import Priority

URGENCY: dict[Priority, int] = {name: rank for rank, name in enumerate(get_args(Priority))}
URGENT: frozenset[Priority] = frozenset(("live", "interactive"))  # somebody waits for each window
# More urgent windows at most, while one of the class waits.
PASSED_BY: dict[Priority, int] = {"interactive": 8, "later": 8, "bulk": 16}
# Of pages or rows: where more would be taken, by whomever, no window of the class begins.
SHARES: dict[Priority, float] = {"later": 0.875, "bulk": 0.5}

BEHIND_ENCODER = 5  # nice values, some three times less of a core that both want


class Turns:
    """Counts who was passed by, for one thing that windows wait for. Not thread-safe."""

    def __init__(self, passed_by: Mapping[Priority, int] = PASSED_BY) -> None:
        """passed_by: how often a class may be; one that is not in it for ever."""
        self._most = passed_by
        self._passed_by: dict[Priority, int] = {}

    def next(self, waiting: Collection[Priority]) -> Priority:
        """The class whose window goes now, of those that have one waiting: at least one."""
        return min(waiting, key=lambda one: (not self.is_due(one), URGENCY[one]))

    def is_due(self, priority: Priority) -> bool:
        """Whether its turn has come, however urgent the others are."""
        most = self._most.get(priority)
        return most is not None and self._passed_by.get(priority, 0) >= most

    def went(self, gone: Priority, waiting: Collection[Priority]) -> None:
        """Note that a window of a class goes while windows of these classes wait on."""
        self._passed_by = {
            one: self._passed_by.get(one, 0) + 1 for one in waiting if URGENCY[one] > URGENCY[gone]
        } | {
            one: passed_by
            for one, passed_by in self._passed_by.items()
            if one in waiting and URGENCY[one] < URGENCY[gone]
        }


def leaves_room(used: int, wanted: int, total: int, share: float) -> bool:
    """Whether `wanted` pages or rows of `total` may be taken: always where nothing is used."""
    return used + wanted <= max(wanted, share * total)


def let_encoder_go_first() -> None:
    """Give the calling thread a lower priority than that of an encoder on a CPU.

    For a decoder's threads: while the encoder goes first, more windows come to share a step, which
    reads all weights. And for those that decode audio: else they cut long files into windows that
    nobody takes yet, while a short one waits in both pools. Inherited by threads that the caller
    starts; does nothing where the system refuses.
    """
    if sys.platform != "linux":  # elsewhere a thread has no priority of its own
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, now + BEHIND_ENCODER)  # 19 at most


def run_when_idle() -> None:
    """Have the calling thread, and what it starts, run in idle time alone, for good (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: the calling thread
