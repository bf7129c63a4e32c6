"""Time and randomness, passed in so that policies can run on a virtual clock.

The event loop must then have the same virtual time, since asyncio's timeouts follow it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random, SystemRandom


@dataclass(frozen=True, slots=True)
class Clock:
    monotonic: Callable[[], float]  # seconds since some moment
    sleep: Callable[[float], Awaitable[None]]  # for so many seconds
    random: Random


SYSTEM_CLOCK = Clock(time.monotonic, asyncio.sleep, SystemRandom())
