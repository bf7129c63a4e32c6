"""The updates of one session on their way through the pools, one at a time.

One that is of no more use is given up, and cancelled everywhere. How long updates take is told to
the pace of all sessions. What is of use, the caller says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.live.parts import SessionParts
from router.live.timeline import Turn
from router.live.updates import Decoded, Work


class Attempts:
    """Numbers a session's updates."""

    def __init__(
        self, parts: SessionParts, session_id: str, owner: bytes, changed: asyncio.Event
    ) -> None:
        """changed: set when what is of use may have changed; it is cleared here."""
        self._parts = parts
        self._id = session_id
        self._owner = owner
        self._changed = changed
        self._n = 0
        self.is_running = False
        self.overtaken = 0  # in a row

    async def decode(
        self, work: Work, turn: Turn, *, peaks: bool, is_overtaken: Callable[[float], bool]
    ) -> Decoded | None:
        """Decode; None where it was overtaken, or its turn cleared.

        Args:
            is_overtaken: by the seconds that it has taken so far.

        Raises:
            SplitscribeError: as `Updates.decode`.
        """
        parts, clock = self._parts, self._parts.clock
        began_s = clock.monotonic()
        self._n += 1
        updating = asyncio.ensure_future(
            parts.updates.decode(
                work,
                request_id=self._id,
                turn=turn.number,
                number=self._n,
                owner=self._owner,
                peaks=peaks,
                parent=turn.span.traceparent,
            )
        )
        self.is_running = True
        try:
            while not updating.done():
                waited_s = clock.monotonic() - began_s
                if is_overtaken(waited_s):
                    self.overtaken += 1
                    parts.observer.update_overtaken()
                    parts.pace.took(waited_s)
                    return None
                await self._change_or(updating)
            decoded = await updating
        finally:
            self.is_running = False
            await _cancelled(updating)
        self._answered(clock.monotonic() - began_s, decoded)
        return None if turn.is_dropped else decoded

    def _answered(self, took_s: float, decoded: Decoded) -> None:
        pace = self._parts.pace
        self.overtaken = 0
        pace.took(took_s)
        self._parts.observer.update_answered(took_s, decoded.encode_s, pace.hop_s)

    async def _change_or(self, task: asyncio.Future[Decoded]) -> None:
        """Wait until the task is done, or there is more audio or another wish."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, changed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()


async def _cancelled(task: asyncio.Future[Decoded]) -> None:
    """End a task that may still run, and wait for that, so that nothing is left behind."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
