"""What `splitscribe transcribe --live` asks of a live session, and what it is told.

`live_remote` has a server's session, `live_local` one of this process. Nothing here does any work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import Pcm


@dataclass(frozen=True, slots=True)
class Said:
    """What is told: text that follows what was told before, or the end of a turn.

    error: why a turn that ended has no more text.
    """

    text: str = ""
    ends_turn: bool = False
    error: str | None = None


class LiveClient(Protocol):
    """A live session, wherever it runs."""

    rate: int  # Hz of the sound that it takes

    @property
    def unsent_s(self) -> float:
        """Seconds of sound that wait here."""

    async def append(self, pcm: Pcm) -> None:
        """Take sound: int16 [n_samples] at `rate`."""

    async def end(self) -> None:
        """No more sound follows: `said` ends when all that was spoken is told."""

    def said(self) -> AsyncIterator[Said]:
        """What is told, in order."""
