"""What waits to be sent to one realtime client: bounded, and paced where nothing else bounds it.

A client that reads too slowly must cost its connection, not the router's memory. On the router's
own listener `send` waits until the client has read. Behind Ray Serve's proxy it never waits: what
is sent lies in queues there. So the pace is bounded here, and a client that has stopped reading
altogether is found by the pings of Serve's HTTP server, within 40 s.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from cluster.clock import Clock
from router.live.protocol.events import Event

MAX_WAITING_BYTES = 1 << 20
SEND_TIMEOUT_S = 30.0  # of one event

Send = Callable[[str], Awaitable[None]]


class SlowReaderError(Exception):
    """The client does not read what it is sent."""


@dataclass(frozen=True, slots=True)
class Pace:
    """At most `burst_bytes` at once, and `bytes_per_s` in the long run."""

    bytes_per_s: float = 65_536.0
    burst_bytes: float = 1_048_576.0


class Outbox:
    """The events of one connection on their way out. Used by one event loop."""

    def __init__(self, send: Send, clock: Clock, pace: Pace | None) -> None:
        """`pace`: None where `send` itself waits for the client."""
        self._send = send
        self._clock = clock
        self._pace = pace
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._credit = pace.burst_bytes if pace else 0.0
        self._credited_s = clock.monotonic()

    def put(self, events: Iterable[Event]) -> None:
        """Take events, to be sent in order.

        Raises:
            SlowReaderError: so much waits already that the client cannot be reading.
        """
        for event in events:
            text = json.dumps(event, separators=(",", ":"))  # ASCII: a character is a byte
            # One event that is long by itself is not the reader's fault.
            if self._waiting and self._bytes + len(text) > MAX_WAITING_BYTES:
                raise SlowReaderError
            self._waiting.append(text)
            self._bytes += len(text)
            self._idle.clear()
            self._changed.set()

    async def run(self) -> None:
        """Send what comes, until cancelled.

        Raises:
            SlowReaderError: one event took too long.
        """
        while True:
            while not self._waiting:
                self._idle.set()
                self._changed.clear()
                await self._changed.wait()
            text = self._waiting[0]
            await self._wait_for_credit(len(text))
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._send(text)
            except TimeoutError:
                raise SlowReaderError from None
            self._waiting.popleft()
            self._bytes -= len(text)

    async def sent(self) -> None:
        """Wait until nothing waits."""
        await self._idle.wait()

    async def _wait_for_credit(self, wanted: int) -> None:
        if self._pace is None:
            return
        now_s = self._clock.monotonic()
        earned = (now_s - self._credited_s) * self._pace.bytes_per_s
        self._credit = min(self._credit + earned, self._pace.burst_bytes) - wanted
        self._credited_s = now_s
        if self._credit < 0:
            await self._clock.sleep(-self._credit / self._pace.bytes_per_s)
