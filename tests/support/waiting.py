"""Waiting for a condition with a generous deadline, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

DEADLINE_S = 30.0


def wait_until(
    condition: Callable[[], Any],
    timeout_s: float = DEADLINE_S,
    what: str = "",
    every_s: float = 0.1,
) -> Any:
    """Poll until `condition()` is true, at first often; its exceptions count as not yet."""
    begun_s = time.monotonic()
    last: object = None
    while (passed_s := time.monotonic() - begun_s) < timeout_s:
        try:
            if value := condition():
                return value
        except Exception as error:
            last = error
        time.sleep(min(every_s, 0.002 + passed_s / 10))
    raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {last!r})")


async def eventually(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            held = condition()
            if await held if inspect.isawaitable(held) else held:
                return
            await asyncio.sleep(0.005)
