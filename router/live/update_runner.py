"""Runs the updates of one session, one at a time.

It cancels an update that is no longer worth waiting for, which its caller decides, and records in
the pace of all sessions how long updates take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.live.parts import SessionParts
from router.live.timeline import Turn
from router.live.update_decoder import UpdateRequest, UpdateResult


class UpdateRunner:
    """Runs a session's updates.

    is_running: whether one is being decoded. overtaken: how many were cancelled in a row.
    """

    def __init__(
        self, parts: SessionParts, session_id: str, owner: bytes, changed: asyncio.Event
    ) -> None:
        """changed: set by others when `is_overtaken` may have changed; it is cleared here."""
        self._parts = parts
        self._id = session_id
        self._owner = owner
        self._changed = changed
        self._n = 0
        self.is_running = False
        self.overtaken = 0  # in a row

    async def decode(
        self,
        request: UpdateRequest,
        turn: Turn,
        *,
        with_peaks: bool,
        is_overtaken: Callable[[float], bool],
    ) -> UpdateResult | None:
        """Decode one update. None if it was overtaken, or its turn was cleared.

        Args:
            is_overtaken: whether to cancel it after so many seconds.

        Raises:
            SplitscribeError: as `UpdateDecoder.decode`.
        """
        parts, clock = self._parts, self._parts.clock
        began_s = clock.monotonic()
        self._n += 1
        updating = asyncio.ensure_future(
            parts.update_decoder.decode(
                request,
                request_id=self._id,
                turn=turn.number,
                number=self._n,
                owner=self._owner,
                with_peaks=with_peaks,
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
                    parts.pace.record(waited_s)
                    return None
                await self._change_or(updating)
            decoded = await updating
        finally:
            self.is_running = False
            await _cancelled(updating)
        self._answered(clock.monotonic() - began_s, decoded)
        return None if turn.is_cleared else decoded

    def _answered(self, took_s: float, decoded: UpdateResult) -> None:
        pace = self._parts.pace
        self.overtaken = 0
        pace.record(took_s)
        self._parts.observer.update_answered(took_s, decoded.encode_s, pace.hop_s)

    async def _change_or(self, task: asyncio.Future[UpdateResult]) -> None:
        """Wait until the task is done, or `changed` is set."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, changed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()


async def _cancelled(task: asyncio.Future[UpdateResult]) -> None:
    """Cancel a task that may still run, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
