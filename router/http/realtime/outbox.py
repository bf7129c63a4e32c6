"""The queue of events to one realtime client: bounded, and with a limited rate behind a proxy.

A client that reads too slowly must lose its connection, not fill the router's memory. On the
router's own listener, `send` waits until the client has read. Behind Ray Serve's proxy it never
waits, and events pile up in the proxy's queues; so the rate is limited here. A client that has
stopped reading altogether is found by the pings of Serve's HTTP server, within 40 s.
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
SEND_TIMEOUT_S = 30.0  # for one event

Send = Callable[[str], Awaitable[None]]


class SlowReaderError(Exception):
    """The client does not read what it is sent."""


@dataclass(frozen=True, slots=True)
class SendRate:
    """At most `burst_bytes` at once, and `bytes_per_s` over a longer time."""

    bytes_per_s: float = 65_536.0
    burst_bytes: float = 1_048_576.0


class Outbox:
    """The events that wait to be sent on one connection. Used by one event loop."""

    def __init__(self, send: Send, clock: Clock, rate: SendRate | None) -> None:
        """rate: None if `send` itself waits for the client."""
        self._send = send
        self._clock = clock
        self._rate = rate
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._credit = rate.burst_bytes if rate else 0.0
        self._credited_s = clock.monotonic()

    def put(self, events: Iterable[Event]) -> None:
        """Take events, to be sent in order.

        Raises:
            SlowReaderError: more than `MAX_WAITING_BYTES` wait to be sent.
        """
        for event in events:
            text = json.dumps(event, separators=(",", ":"))  # ASCII: a character is a byte
            # One long event alone is not the client's fault.
            if self._waiting and self._bytes + len(text) > MAX_WAITING_BYTES:
                raise SlowReaderError
            self._waiting.append(text)
            self._bytes += len(text)
            self._idle.clear()
            self._changed.set()

    async def run(self) -> None:
        """Send the events as they come, until cancelled.

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
        """Wait until all events are sent."""
        await self._idle.wait()

    async def _wait_for_credit(self, wanted: int) -> None:
        if self._rate is None:
            return
        now_s = self._clock.monotonic()
        earned = (now_s - self._credited_s) * self._rate.bytes_per_s
        self._credit = min(self._credit + earned, self._rate.burst_bytes) - wanted
        self._credited_s = now_s
        if self._credit < 0:
            await self._clock.sleep(-self._credit / self._rate.bytes_per_s)
