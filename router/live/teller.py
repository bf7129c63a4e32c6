"""What one session tells its client, in order: texts of turns, and how these end.

Knows turns and tokens that are certain, nothing of audio that is still to be decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from cluster.errors import SplitscribeError
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from router.live.draft import Certain
from router.live.interface import LiveEvent, TurnCompleted, TurnFailed
from router.live.observer import LiveObserver
from router.live.timeline import Turn, seconds


class Teller:
    """The events of one session."""

    def __init__(self, observer: LiveObserver) -> None:
        self._observer = observer
        self._events: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        self.is_over = False

    async def events(self) -> AsyncIterator[LiveEvent]:
        """As `router.live.interface.LiveSession.events`."""
        while (event := await self._events.get()) is not None:
            yield event

    def tell(self, event: LiveEvent) -> None:
        if not self.is_over:
            self._events.put_nowait(event)

    def say(
        self, turn: Turn, language: str, tokens: Sequence[Certain], start: int, newest: int
    ) -> None:
        """Tell the text of tokens that became certain.

        Args:
            start: the sample from which the tokens' positions count.
            newest: where the audio ends, from which the delay of words is counted.
        """
        if turn.is_dropped or not tokens:
            return
        turn.language = turn.language or language
        delta = turn.text.add(
            turn.number, [item.token for item in tokens], [item.logprob for item in tokens]
        )
        if delta is None:
            return
        turn.is_told = True
        self.tell(delta)
        for item in tokens:
            if item.peak is not None:
                at = start + item.peak * SAMPLES_PER_POSITION
                self._observer.word_told(seconds(newest - at))

    def complete(self, turn: Turn, end: int) -> None:
        """Tell the end of a turn, whose audio ends at sample `end`."""
        turn.is_told = True
        audio_s = seconds(max(0, end - turn.start))
        self._observer.turn_ended(audio_s, failed=turn.error is not None)
        turn.span.note(audio_s=audio_s)
        turn.span.end(turn.error)
        if turn.error is not None:
            self.tell(TurnFailed(turn.number, turn.error))
            return
        if (delta := turn.text.finish(turn.number)) is not None:
            self.tell(delta)
        text = turn.text
        language = turn.language or turn.config.language
        self.tell(TurnCompleted(turn.number, text.told, audio_s, language, tuple(text.logprobs)))

    def fail(self, turns: Iterable[Turn], error: SplitscribeError, end: int) -> None:
        """End these turns by an error, where anything was told of them."""
        for turn in sorted(set(turns), key=lambda turn: turn.number):
            if turn.is_told and not turn.is_dropped:
                turn.error = error
                self.complete(turn, end)

    def end(self) -> None:
        """Nothing more is told."""
        self._events.put_nowait(None)
        self.is_over = True
