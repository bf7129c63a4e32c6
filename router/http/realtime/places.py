"""The realtime sessions that a router has open: counted, limited, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import RateLimitError
from cluster.settings import LiveSettings
from router.http.realtime.connection import RealtimeConnection

RETRY_AFTER_S = 5.0


class Place:
    """One session among those that are counted. owner: its key's number."""

    def __init__(self, owner: int | None) -> None:
        self.owner = owner
        self.connection: RealtimeConnection | None = None  # once the upgrade is done


class Places:
    """Used by one event loop."""

    def __init__(self, limits: LiveSettings) -> None:
        self._limits = limits
        self._places: list[Place] = []
        self._all_left = asyncio.Event()
        self._all_left.set()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def connections(self) -> list[RealtimeConnection]:
        return [place.connection for place in self._places if place.connection is not None]

    @contextmanager
    def place_of(self, owner: int | None) -> Iterator[Place]:
        """Count a session of this key while it is open. Raises RateLimitError."""
        of_key = sum(place.owner == owner for place in self._places)
        if owner is not None and self._limits.max_sessions_per_key:
            _check_room(of_key, self._limits.max_sessions_per_key, "This API key has")
        _check_room(len(self), self._limits.max_sessions, "This server has")
        place = Place(owner)
        self._places.append(place)
        self._all_left.clear()
        try:
            yield place
        finally:
            self._places.remove(place)
            if not self._places:
                self._all_left.set()

    async def all_left(self) -> None:
        """Wait until no session is open."""
        await self._all_left.wait()


def _check_room(taken: int, most: int, who: str) -> None:
    if taken >= most:
        raise RateLimitError(
            f"{who} {taken} realtime sessions open, of at most {most}. Please try again when one "
            f"has ended.",
            retry_after_s=RETRY_AFTER_S,
        )
