"""Live transcription with one model: the engine and its sessions.

A session joins its audio, the turn detector, which finds utterances, the schedule, which decides
when an update is due, and the transcriber, which turns utterances into text. New audio drives all
of them; no timer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from cluster.common.errors import OverloadedError, UnsupportedValueError, WorkerError
from cluster.common.logs import log_fields
from cluster.common.messages import Pcm
from router.audio.vad import Probabilities
from router.live.interface import LiveConfig, LiveEvent
from router.live.schedule import Schedule
from router.live.turn_detector import TurnDetector
from router.live.turns import AudioBuffer, SessionEvents, Turn, seconds
from router.live.updates import LiveEngineParts, UtteranceTranscriber
from router.speakers.voices import NO_SPEAKER_MODEL

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0


class LiveEngine(LiveEngineParts):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.sessions: set[LiveSession] = set()  # open ones

    def open(self, config: LiveConfig, *, session_id: str, owner: bytes = b"") -> LiveSession:
        """session_id: for logs and traces. Raises OverloadedError or UnsupportedValueError."""
        self.check(config)
        if self.pace.is_overloaded:
            raise OverloadedError(
                "the workers have no time for another live session: an update of the open ones "
                f"takes {self.pace.update_s:.1f} s",
                retry_after_s=RETRY_AFTER_S,
            )
        session = LiveSession(self, config, session_id, owner)
        self.sessions.add(session)
        return session

    def check(self, config: LiveConfig) -> None:
        """Raises UnsupportedValueError if speakers are wanted and there is no network for them."""
        if config.diarize and self.voices is None:
            raise UnsupportedValueError(
                NO_SPEAKER_MODEL, param="session.audio.input.transcription.diarize"
            )

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self.sessions)))


class LiveSession:
    """One client's session, used on the event loop. After `drain` or `close`, audio is ignored."""

    def __init__(
        self, engine: LiveEngine, config: LiveConfig, session_id: str, owner: bytes
    ) -> None:
        self._engine = engine
        self._id = session_id
        self._audio = AudioBuffer()
        self._events = SessionEvents(engine.tokenizer, engine.recorder, engine.tracer, session_id)
        self._detector = TurnDetector(config, self._events)
        self._schedule = Schedule(engine.pace, self._audio, self._detector)
        self._transcriber = UtteranceTranscriber(
            engine, session_id, owner, self._audio, self._detector, self._schedule, self._events
        )
        self._changed = self._transcriber.changed
        self._vad_stream = engine.activity.open_stream(self._on_probabilities)
        self._over = asyncio.Event()
        self._is_draining = False
        self._internal_error: Exception | None = None  # an internal error, which ends the session
        self._updating = asyncio.get_running_loop().create_task(self._update_until_done())

    def configure(self, config: LiveConfig) -> None:
        """Change turn detection at once, and all else for turns without text. Raises as `check`."""
        self._engine.check(config)
        self._detector.configure(config)
        self._changed.set()

    def append(self, pcm: Pcm) -> None:
        """pcm: int16 [n_samples], 16 kHz mono, any length. The caller limits `unsent_s`."""
        if self._events.is_over or self._is_draining or not pcm.shape[0]:
            return
        self._audio.append(pcm)
        self._detector.appended(int(pcm.shape[0]))
        self._engine.activity.feed(self._vad_stream, pcm)

    def commit(self) -> int | None:
        """End the turn here. Return its number, or None if there is no audio to commit."""
        if self._events.is_over or self._is_draining:
            return None
        turn = self._detector.commit()
        self._changed.set()
        return None if turn is None else turn.number

    def clear(self) -> None:
        """Drop uncommitted audio. An announced turn ends with the text that was sent."""
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
        """May be iterated once. The queue has no limit, since its events are few and small."""
        return self._events.events()

    def take_events(self) -> list[LiveEvent]:
        """Return the waiting events, which `events` then does not yield."""
        return self._events.take()

    async def drain(self) -> None:
        """Commit the open turn, wait until every turn has ended, and end `events`."""
        self._is_draining = True
        self._finish_draining()
        self._changed.set()
        await self._over.wait()

    async def close(self) -> None:
        """End at once. May be called repeatedly, and after `drain`."""
        self._updating.cancel()
        await asyncio.wait([self._updating])
        self._end()

    # -- from voice activity to text -----------------------------------------------------------

    def _on_probabilities(self, probabilities: Probabilities) -> None:
        try:
            self._detector.add_probabilities(probabilities)
            self._finish_draining()
            self._audio.drop_before(self._detector.needed_from)
        except Exception as error:  # must not end the other sessions of the VAD tick
            self._internal_error = error
        self._changed.set()

    def _finish_draining(self) -> None:
        if self._is_draining and not self._detector.has_undetected_audio:
            self._detector.commit()

    async def _update_until_done(self) -> None:
        detector = self._detector
        try:
            while not self._is_draining or detector.has_undetected_audio or self._open_turns:
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
    def _open_turns(self) -> list[Turn]:
        decoding = (utterance.turn for utterance in self._detector.utterances)
        return [*decoding, *self._detector.turns]

    def _end(self) -> None:
        if self._events.is_over:
            return
        self._engine.activity.close_stream(self._vad_stream)
        self._audio.drop_before(self._audio.end)  # frees it now despite the reference cycle
        for turn in self._open_turns:
            turn.span.end()
        self._events.close()
        self._over.set()
        self._engine.sessions.discard(self)
