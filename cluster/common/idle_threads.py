"""Threads that compute only while no other thread wants their core: for work that can wait.

The operating system takes the core away from such a thread within microseconds, whatever it is
doing, and gives it back when nobody else runs there. A nice value would leave it a share.

Linux shares cores out between sessions first where `kernel.sched_autogroup_enabled` is 1, as on
most systems outside of containers. So all that belongs to one server is in one session.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def run_when_idle() -> None:
    """Make the calling thread such a thread, for good.

    Threads and processes that it starts from then on are such, too. Does nothing where the system
    has no such policy (Linux has), or refuses it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: the calling thread
