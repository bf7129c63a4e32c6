"""Time and chance, handed to whatever needs them, so that policies can run on a virtual clock.

Timeouts (`asyncio.timeout`, `asyncio.wait`, `loop.call_later`) follow the time of the event loop:
a virtual clock needs an event loop whose time is the same virtual one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random, SystemRandom


@dataclass(frozen=True, slots=True)
class Clock:
    """monotonic: seconds since some moment. sleep: waits so many seconds. random: all chance."""

    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    random: Random


SYSTEM_CLOCK = Clock(time.monotonic, asyncio.sleep, SystemRandom())
