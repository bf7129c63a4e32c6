"""Finds the windows on which workers die, and refuses their audio for a while.

When a worker dies, each of its windows may be the cause, and all are tried again. Windows that lost
two workers go one at a time, so that the next death shows which of them is the cause.
"""

from __future__ import annotations

import asyncio

from cluster.common.clock import Clock
from cluster.common.errors import WindowRefusedError, WorkerDiedError

MOST_ENDED = 2  # deaths before a refusal; one more, alone, if other windows may be the cause
REFUSED_S = 300.0  # how long the audio is refused


class DeadlyAudio:
    """Serves all requests for one model in this process. Windows are named by their `id()`."""

    def __init__(self, clock: Clock) -> None:
        self.one_by_one = asyncio.Lock()
        self._clock = clock
        self._deaths: dict[int, int] = {}  # of workers, by window in progress
        self._refused: dict[bytes, tuple[float, str]] = {}  # (until when, why) by audio key

    def __bool__(self) -> bool:
        """Whether some audio is refused now, so that keys are worth computing."""
        now_s = self._clock.monotonic()
        return any(until_s > now_s for until_s, _ in self._refused.values())

    def check(self, audio_key: bytes) -> None:
        """Raises WindowRefusedError while this audio is refused."""
        until_s, reason = self._refused.get(audio_key, (0.0, ""))
        if self._clock.monotonic() < until_s:
            raise WindowRefusedError(reason)

    def goes_alone(self, window: int) -> bool:
        return self._deaths.get(window, 0) >= MOST_ENDED

    def note_death(self, window: int, audio_key: bytes, error: WorkerDiedError) -> None:
        """Raises WindowRefusedError, unless another window may have caused the deaths."""
        has_company = bool(self._deaths.keys() - {window})
        n_ended = self._deaths[window] = self._deaths.get(window, 0) + 1
        if n_ended < MOST_ENDED or (n_ended == MOST_ENDED and has_company):
            return
        reason = f"{n_ended} workers died while they had this audio, the last by: {error}"
        now_s = self._clock.monotonic()
        self._refused = {key: one for key, one in self._refused.items() if one[0] > now_s}
        self._refused[audio_key] = now_s + REFUSED_S, reason
        raise WindowRefusedError(reason) from error

    def forget(self, window: int) -> None:
        self._deaths.pop(window, None)
