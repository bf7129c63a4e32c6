"""The open realtime sessions of a router: counts them, limits their number, waits for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import RateLimitError
from cluster.settings import LiveSettings
from router.http.realtime.connection import RealtimeConnection

RETRY_AFTER_S = 5.0


class SessionSlot:
    """The slot of one open session. owner: number of its API key; None without keys."""

    def __init__(self, owner: int | None) -> None:
        self.owner = owner
        self.connection: RealtimeConnection | None = None  # set after the upgrade


class SessionSlots:
    """The slots of all open sessions. Used by one event loop."""

    def __init__(self, limits: LiveSettings) -> None:
        self._limits = limits
        self._slots: list[SessionSlot] = []
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def connections(self) -> list[RealtimeConnection]:
        return [slot.connection for slot in self._slots if slot.connection is not None]

    @contextmanager
    def occupy(self, owner: int | None) -> Iterator[SessionSlot]:
        """Take a slot for a session of this key while it is open. Raises RateLimitError."""
        of_key = sum(slot.owner == owner for slot in self._slots)
        if owner is not None and self._limits.max_sessions_per_key:
            _check_room(of_key, self._limits.max_sessions_per_key, "This API key has")
        _check_room(len(self), self._limits.max_sessions, "This server has")
        slot = SessionSlot(owner)
        self._slots.append(slot)
        self._all_ended.clear()
        try:
            yield slot
        finally:
            self._slots.remove(slot)
            if not self._slots:
                self._all_ended.set()

    async def all_ended(self) -> None:
        """Wait until no session is open."""
        await self._all_ended.wait()


def _check_room(taken: int, most: int, who: str) -> None:
    if taken >= most:
        raise RateLimitError(
            f"{who} {taken} realtime sessions open, which is the most that are allowed. Please try "
            f"again when one has ended.",
            retry_after_s=RETRY_AFTER_S,
        )
