"""Audio on which workers die: which windows are suspected, and which are refused for a while.

When a worker dies, each window that it had may be the cause. Most are not, and are tried again at
once. Those whose workers died twice go one by one; when a worker dies of one alone, that is it.
"""

from __future__ import annotations

import asyncio

from cluster.common.clock import Clock
from cluster.common.errors import WindowRefusedError, WorkerDiedError

MOST_ENDED = 2  # workers that a window may end; one that had company at them ends a third, alone
REFUSED_S = 300.0  # for which its audio is refused


class DeadlyAudio:
    """Of one model's requests in this process. Windows are named by what is theirs alone."""

    def __init__(self, clock: Clock) -> None:
        self.one_by_one = asyncio.Lock()
        self._clock = clock
        self._deaths: dict[int, int] = {}  # of workers, by window that is not done yet
        self._refused: dict[bytes, tuple[float, str]] = {}  # until when and why, by audio

    def __bool__(self) -> bool:
        return bool(self._refused)

    def check(self, audio_key: bytes) -> None:
        """Raises WindowRefusedError where workers died of the same audio not long ago."""
        until_s, reason = self._refused.get(audio_key, (0.0, ""))
        if self._clock.monotonic() < until_s:
            raise WindowRefusedError(reason)

    def goes_alone(self, window: int) -> bool:
        return self._deaths.get(window, 0) >= MOST_ENDED

    def note_death(self, window: int, audio_key: bytes, error: WorkerDiedError) -> None:
        """Raises WindowRefusedError, unless another window may be what the workers died of."""
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
