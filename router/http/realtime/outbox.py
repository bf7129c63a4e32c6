"""The queue of events that wait to be sent to a realtime client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable

from cluster.common.clock import Clock
from router.http.listener import Budget
from router.live.protocol.events import Event

MAX_WAITING_BYTES = 1 << 20
SEND_TIMEOUT_S = 30.0  # for one event
BYTES_PER_S, BYTES_AT_ONCE = 65_536.0, 1_048_576.0  # behind a proxy

Send = Callable[[str], Awaitable[None]]


class SlowReaderError(Exception):
    """The client does not read its events fast enough."""


class Outbox:
    """A bounded queue, so that a slow client loses its connection and does not fill the memory.

    On the router's own listener, `send` waits for the client. Behind Ray Serve's proxy it does not,
    so the rate is limited; Serve's pings find a client that reads nothing within 40 s.
    """

    def __init__(self, send: Send, clock: Clock, *, is_limited: bool) -> None:
        self._send = send
        self._clock = clock
        self._budget = Budget(BYTES_PER_S, BYTES_AT_ONCE) if is_limited else None
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._bytes = 0  # of waiting events and of the one that is being sent

    def put(self, events: Iterable[Event]) -> None:
        """Queue events. Raises SlowReaderError if more than `MAX_WAITING_BYTES` wait."""
        for event in events:
            text = json.dumps(event, separators=(",", ":"))  # ASCII: a character is a byte
            # One long event alone is not the client's fault.
            if self._bytes and self._bytes + len(text) > MAX_WAITING_BYTES:
                raise SlowReaderError
            self._waiting.put_nowait(text)
            self._bytes += len(text)

    async def run(self) -> None:
        """Send events until cancelled. Raises SlowReaderError if one takes `SEND_TIMEOUT_S`."""
        while True:
            text = await self._waiting.get()
            if self._budget is not None:
                await self._clock.sleep(self._budget.spend(len(text), self._clock.monotonic()))
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._send(text)
            except TimeoutError:
                raise SlowReaderError from None
            self._bytes -= len(text)
            self._waiting.task_done()

    async def sent(self) -> None:
        await self._waiting.join()
