"""Time and chance, handed to whatever needs them, so that policies can run on a virtual clock.

Its event loop needs the same virtual time: asyncio's timeouts follow the loop's.
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
