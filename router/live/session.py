"""One live session: takes audio, and emits text as soon as it is confirmed.

It joins the session's parts: the audio, the turn detector, which says what is an utterance, the
schedule, which says when the oldest utterance is due for an update, and the transcriber, which
turns it into text. New audio drives all of this, never a clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from cluster.common.errors import WorkerError
from cluster.common.logs import log_fields
from cluster.common.messages import Pcm
from router.live.activity import Probabilities
from router.live.interface import LiveConfig, LiveEvent
from router.live.schedule import Schedule
from router.live.session_events import SessionEvents
from router.live.timeline import AudioBuffer, Turn, TurnText, ends_sentence, seconds
from router.live.turn_detector import TurnDetector
from router.live.update_decoder import SessionParts, UpdateRunner
from router.live.utterance_transcriber import UtteranceTranscriber

logger = logging.getLogger(__name__)


class Session:
    """Implements `router.live.interface.LiveSession`."""

    def __init__(
        self,
        parts: SessionParts,
        config: LiveConfig,
        *,
        session_id: str,
        owner: bytes = b"",
        on_end: Callable[[Session], None] = lambda session: None,
    ) -> None:
        """on_end: called once, when no more events follow."""
        self._parts = parts
        self._id = session_id
        self._on_end = on_end
        self._audio = AudioBuffer()
        self._events = SessionEvents(parts.observer)
        self._detector = TurnDetector(config, self._make_turn, self._events.emit, self._is_finished)
        self._schedule = Schedule(parts.pace, parts.delay, self._audio, self._detector)
        self._changed = asyncio.Event()
        self._runner = UpdateRunner(parts, session_id, owner, self._changed)
        self._transcriber = UtteranceTranscriber(
            parts,
            session_id,
            self._audio,
            self._detector,
            self._schedule,
            self._events,
            self._runner,
        )
        self._vad_stream = parts.activity.open_stream(self._on_probabilities)
        self._over = asyncio.Event()
        self._is_draining = False
        self._internal_error: Exception | None = None  # a mistake in our code; it ends the session
        self._updating = asyncio.get_running_loop().create_task(self._update_until_done())

    # -- LiveSession -------------------------------------------------------------------------

    def configure(self, config: LiveConfig) -> None:
        self._detector.configure(config)
        self._changed.set()

    def append(self, pcm: Pcm) -> None:
        if self._events.is_over or self._is_draining or not pcm.shape[0]:
            return
        self._audio.append(pcm)
        self._detector.appended(int(pcm.shape[0]))
        self._parts.activity.feed(self._vad_stream, pcm)

    def commit(self) -> int | None:
        if self._events.is_over or self._is_draining:
            return None
        turn = self._detector.commit()
        self._changed.set()
        return None if turn is None else turn.number

    def clear(self) -> None:
        if self._events.is_over:
            return
        if (turn := self._detector.clear()) is not None:
            self._events.end_turn(turn, self._audio.end)
        self._changed.set()

    @property
    def unsent_s(self) -> float:
        utterances = self._detector.utterances
        done_to = utterances[0].updated_to if utterances else self._detector.detected_to
        return seconds(max(0, self._audio.end - done_to))

    def events(self) -> AsyncIterator[LiveEvent]:
        return self._events.events()

    def take_events(self) -> list[LiveEvent]:
        return self._events.take()

    async def drain(self) -> None:
        self._is_draining = True
        self._finish_draining()
        self._changed.set()
        await self._over.wait()

    async def close(self) -> None:
        self._updating.cancel()
        await asyncio.wait([self._updating])
        self._end()

    @property
    def has_unfinished_work(self) -> bool:
        """Whether audio that was appended still waits to be detected, decoded or emitted."""
        is_decoding = self._runner.is_running
        return self._detector.has_undetected_audio or is_decoding or self._schedule.is_due()

    # -- what the turn detector asks for, and what voice activity gives --------------------------

    def _make_turn(self, number: int, start: int, config: LiveConfig) -> Turn:
        text = TurnText(self._parts.tokenizer, logprobs=config.logprobs)
        span = self._parts.tracer.root("live turn", "", request_id=self._id, turn=number)
        return Turn(number, start, config, text, cut_at=start, last_speech_end=start, span=span)

    def _is_finished(self, turn: Turn) -> bool:
        """Whether all audio of a turn is decoded, and its text ends with a sentence."""
        is_known = all(utterance.turn is not turn for utterance in self._detector.utterances)
        return is_known and ends_sentence(turn.text.emitted)

    def _on_probabilities(self, probabilities: Probabilities) -> None:
        try:
            self._detector.add_probabilities(probabilities)
            self._finish_draining()
            self._audio.drop_before(self._detector.needed_from)
        except Exception as error:  # it must end this session, not all that share the VAD batch
            self._internal_error = error
        self._changed.set()

    def _finish_draining(self) -> None:
        if self._is_draining and not self._detector.has_undetected_audio:
            self._detector.commit()

    # -- from utterances to text ---------------------------------------------------------------

    async def _update_until_done(self) -> None:
        try:
            while not self._is_done:
                if self._internal_error is not None:
                    raise self._internal_error
                if self._schedule.is_due():
                    await self._transcriber.step()
                else:
                    await self._changed.wait()
                    self._changed.clear()
        except Exception:
            logger.exception("a live session failed", extra=log_fields(request_id=self._id))
            error = WorkerError("this live session failed; the server's log says why")
            self._events.fail_turns(self._open_turns, error, self._audio.end)
        finally:
            self._end()

    @property
    def _is_done(self) -> bool:
        detector = self._detector
        is_heard = not detector.has_undetected_audio and not detector.pending_turns
        return self._is_draining and is_heard and not detector.utterances

    @property
    def _open_turns(self) -> list[Turn]:
        return [
            *(utterance.turn for utterance in self._detector.utterances),
            *self._detector.pending_turns,
        ]

    def _end(self) -> None:
        if self._events.is_over:
            return
        self._parts.activity.close_stream(self._vad_stream)
        for turn in self._open_turns:
            turn.span.end()
        self._events.close()
        self._over.set()
        self._on_end(self)
