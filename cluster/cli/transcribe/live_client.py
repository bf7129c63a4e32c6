"""What `splitscribe transcribe --live` needs of a live session, wherever the session runs.

`live_remote` has a server's session, `live_local` one in this process. Nothing here does any work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import Pcm


@dataclass(frozen=True, slots=True)
class Said:
    """Text that follows the text before, or the end of a turn.

    error: why the text of the turn that ended is incomplete; None if it is complete.
    """

    text: str = ""
    ends_turn: bool = False
    error: str | None = None


class LiveClient(Protocol):
    """A live session, wherever it runs."""

    rate: int  # Hz of the audio that it takes

    @property
    def unsent_s(self) -> float:
        """Seconds of audio that wait to be sent or transcribed."""

    async def append(self, pcm: Pcm) -> None:
        """Take audio: int16 [n_samples] at `rate`."""

    async def end(self) -> None:
        """Say that no more audio follows. `said` then ends after the last text."""

    def said(self) -> AsyncIterator[Said]:
        """The texts and ends of turns, in order."""
