"""Classes of windows, and which one goes next where several wait for the same thing.

Live windows go first, then those of short interactive requests, of longer ones, and of bulk work. A
class that was passed by `PASSED_BY` windows has its turn, so that none starves. Long requests and
bulk work leave room to shorter ones (`SHARES`).

On a CPU bulk work runs in idle threads, which yield their core within microseconds. Linux first
shares cores out between sessions (`kernel.sched_autogroup_enabled`), so all processes of a server
are in one session.
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
URGENT: frozenset[Priority] = frozenset(("live", "interactive"))  # a client waits for each window
# How many more urgent windows may go while one of the class waits.
PASSED_BY: dict[Priority, int] = {"interactive": 8, "later": 8, "bulk": 16}
# Share of pages or rows in use above which no window of the class begins.
SHARES: dict[Priority, float] = {"later": 0.875, "bulk": 0.5}

BEHIND_ENCODER = 5  # nice values: a third of the share of a core that both want


class Turns:
    """Counts how often each class was passed by. Not thread-safe."""

    def __init__(self, passed_by: Mapping[Priority, int] = PASSED_BY) -> None:
        self._most = passed_by  # other classes may be passed by for ever
        self._passed_by: dict[Priority, int] = {}

    def next(self, waiting: Collection[Priority]) -> Priority:
        """The class whose window goes now, among those that wait (at least one)."""
        return min(waiting, key=lambda one: (not self.is_due(one), URGENCY[one]))

    def is_due(self, priority: Priority) -> bool:
        """Whether it is the class's turn, however urgent the others are."""
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
    """Whether `wanted` of `total` pages or rows may be taken; always if none is used."""
    return used + wanted <= max(wanted, share * total)


def let_encoder_go_first() -> None:
    """Give the calling thread, and what it starts, a lower priority than a CPU's encoder.

    For a decoder's threads: while the encoder goes first, more windows share a step, which reads
    all weights. For audio workers: else they cut long files into windows that nobody takes yet,
    while short requests wait. Does nothing where the system refuses.
    """
    if sys.platform != "linux":  # elsewhere a thread has no priority of its own
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, now + BEHIND_ENCODER)  # 19 at most


def run_when_idle() -> None:
    """Run the calling thread, and what it starts, in idle time only, for good (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: the calling thread
