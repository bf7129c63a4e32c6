"""The events that one session sends to its client, in order: the turns' texts and their ends.

It knows turns and confirmed tokens, and nothing of audio that is still to be decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from cluster.common.errors import SplitscribeError
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from router.live.interface import LiveEvent, TurnCompleted, TurnFailed
from router.live.observer import LiveObserver
from router.live.partial_transcript import ConfirmedToken
from router.live.timeline import Turn, seconds


class SessionEvents:
    """The queue of one session's events.

    is_over: no more events are taken.
    """

    def __init__(self, observer: LiveObserver) -> None:
        self._observer = observer
        self._queue: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        self.is_over = False

    async def events(self) -> AsyncIterator[LiveEvent]:
        """As `router.live.interface.LiveSession.events`."""
        while (event := await self._queue.get()) is not None:
            yield event

    def take(self) -> list[LiveEvent]:
        """As `router.live.interface.LiveSession.take_events`."""
        taken = []
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)  # `events` still has to end
                break
            taken.append(event)
        return taken

    def emit(self, event: LiveEvent) -> None:
        if not self.is_over:
            self._queue.put_nowait(event)

    def emit_text(
        self, turn: Turn, language: str, tokens: Sequence[ConfirmedToken], start: int, newest: int
    ) -> None:
        """Emit the text of newly confirmed tokens as a delta.

        Args:
            start: the sample from which the tokens' positions are counted.
            newest: the sample at which the audio ends now, to measure the delay of words.
        """
        if turn.is_cleared or not tokens:
            return
        turn.language = turn.language or language
        delta = turn.text.add(
            turn.number, [item.token for item in tokens], [item.logprob for item in tokens]
        )
        if delta is None:
            return
        turn.is_announced = True
        self.emit(delta)
        for item in tokens:
            if item.peak is not None:
                at = start + item.peak * SAMPLES_PER_POSITION
                self._observer.word_told(seconds(newest - at))

    def end_turn(self, turn: Turn, end: int) -> None:
        """Emit the end of a turn whose audio ends at sample `end`."""
        turn.is_announced = True
        audio_s = seconds(max(0, end - turn.start))
        self._observer.turn_ended(audio_s, failed=turn.error is not None)
        turn.span.note(audio_s=audio_s)
        turn.span.end(turn.error)
        if turn.error is not None:
            self.emit(TurnFailed(turn.number, turn.error))
            return
        if (delta := turn.text.finish(turn.number)) is not None:
            self.emit(delta)
        text = turn.text
        language = turn.language or turn.config.language
        self.emit(TurnCompleted(turn.number, text.emitted, audio_s, language, tuple(text.logprobs)))

    def fail_turns(self, turns: Iterable[Turn], error: SplitscribeError, end: int) -> None:
        """End those of these turns that were announced, with an error."""
        for turn in sorted(set(turns), key=lambda turn: turn.number):
            if turn.is_announced and not turn.is_cleared:
                turn.error = error
                self.end_turn(turn, end)

    def close(self) -> None:
        """Take no more events; `events` ends after those that wait."""
        self._queue.put_nowait(None)
        self.is_over = True
