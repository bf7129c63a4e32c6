"""The protocol of one realtime session: events of the client and of the engine in, events out.

A state machine without I/O: `router.http.realtime.connection` carries what it says, and calls it
from one event loop. It knows OpenAI's semantics and nothing of sockets, keys or time.

What it promises, whatever comes in whatever order: every event is answered or taken; every item of
which a client hears ends in exactly one `completed` or `failed`; an error event is only sent for a
mistake that the client must hear of, since many clients end at any error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequestError, SplitscribeError
from cluster.messages import SAMPLE_RATE, Pcm
from router.live.interface import (
    IdleTimeout,
    LiveConfig,
    LiveEvent,
    LiveSession,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnCommitted,
    TurnCompleted,
    TurnFailed,
    TurnSegment,
)
from router.live.protocol.audio_format import StreamDecoder
from router.live.protocol.events import (
    Append,
    Clear,
    ClientEvent,
    Commit,
    Event,
    EventWriter,
    Refused,
    Update,
    error_fields,
    written_logprobs,
)
from router.live.protocol.session_config import ModelNames, SessionConfig
from router.live.protocol.session_objects import as_beta_session, as_session
from router.live.protocol.session_updates import updated

HELD_S = 1.0  # of audio that waits for the session's configuration, if that has not come
MAX_MISTAKES = 100  # errors of one session, after which it is closed

OpenSession = Callable[[LiveConfig], LiveSession]


class TooManyMistakesError(InvalidRequestError):
    """The client has sent so many events that are none that it will not send others."""


@dataclass(slots=True)
class Turn:
    """One turn of the engine as the client knows it. committed: the client was told so."""

    item_id: str
    committed: bool = False


class LiveProtocol:
    """One session. `open_session` makes the engine's; it is called again when another model is
    named before any audio was given to the first."""

    def __init__(
        self,
        config: SessionConfig,
        *,
        names: ModelNames,
        open_session: OpenSession,
        writer: EventWriter,
        expires_at: int,
        is_configured: bool = False,
    ) -> None:
        """`is_configured`: the client has said before what it wants, so no audio is held back."""
        self.config = config
        self.session_id = writer.new_id("sess")
        self.session = open_session(config.live)
        self._names = names
        self._open_session = open_session
        self._writer = writer
        self._expires_at = expires_at
        self._decoder = StreamDecoder(config.audio)
        self._held: list[Pcm] | None = None if is_configured else []
        self._has_audio = False
        self._turns: dict[int, Turn] = {}  # told of, and not ended
        self._last_item: str | None = None
        self._unanswered = 0  # commits without audio, answered when no turn is open
        self._replaced: list[LiveSession] = []
        self._mistakes = 0

    # ---- what the client sends ----

    def open(self) -> list[Event]:
        """What is said first."""
        return [self._writer.session("created", self._written())]

    def receive(self, event: ClientEvent) -> list[Event]:
        """Answer an event of the client.

        Raises:
            TooManyMistakesError: this mistake is one too many.
        """
        match event:
            case Update():
                return self._update(event)
            case Append():
                self._append(event.audio)
                return []
            case Commit():
                return self._commit()
            case Clear():
                self._release_held()
                self._decoder = StreamDecoder(self.config.audio)
                self.session.clear()
                return [self._writer.event("input_audio_buffer.cleared")]
            case Refused():
                return self._mistake(event.error, event.event_id)
        raise AssertionError(f"no event of a client: {event!r}")

    def audio_s(self, event: ClientEvent) -> float:
        """Seconds of audio in an event."""
        return len(event.audio) / self.config.audio.bytes_per_s if isinstance(event, Append) else 0

    @property
    def unsent_s(self) -> float:
        """Seconds of audio that came and are not yet transcribed."""
        return self.session.unsent_s

    def take_replaced(self) -> Sequence[LiveSession]:
        """Sessions of the engine that are not used any more; the caller closes them."""
        taken, self._replaced = self._replaced, []
        return taken

    def _update(self, event: Update) -> list[Event]:
        self._writer.form = event.form
        try:
            config = updated(self.config, event.session, self._names)
            self._configure(config)
        except SplitscribeError as error:
            return self._mistake(error, event.event_id)
        self._release_held()
        return [self._writer.session("updated", self._written())]

    def _configure(self, config: SessionConfig) -> None:
        before = self.config
        if not self._names.are_one(before.live.model, config.live.model):
            if self._has_audio:
                raise InvalidRequestError(
                    "The model of a session cannot be changed once audio has come; open another "
                    "session for it.",
                    param="session.audio.input.transcription.model",
                    code="model_cannot_change",
                )
            opened = self._open_session(config.live)
            self._replaced.append(self.session)
            self.session = opened
        elif config.live != before.live:
            self.session.configure(config.live)
        self.config = config
        if config.audio != before.audio:
            self._flush_decoder()
            self._decoder = StreamDecoder(config.audio)

    def _append(self, audio: bytes) -> None:
        for pcm in self._decoder.decode(audio):
            self._give(pcm)

    def _give(self, pcm: Pcm) -> None:
        """To the engine, or to what waits for the configuration."""
        if self._held is None:
            self._has_audio = True
            self.session.append(pcm)
            return
        self._held.append(pcm)
        if sum(map(len, self._held)) > HELD_S * SAMPLE_RATE:
            self._release_held()

    def _release_held(self) -> None:
        held, self._held = self._held, None
        for pcm in held or ():
            self._give(pcm)

    def _flush_decoder(self) -> None:
        for pcm in self._decoder.flush():
            self._give(pcm)

    def _commit(self) -> list[Event]:
        """A commit without audio gets an item without text, and no error: clients commit although
        the server's own turn detection has taken everything, and wait for an answer."""
        self._release_held()
        self._flush_decoder()
        if (number := self.session.commit()) is not None:
            self._known(number)  # at once: another commit may come before the engine has told
            return []
        self._unanswered += 1
        return self._answer_empty_commits()

    def _answer_empty_commits(self) -> list[Event]:
        """Behind the turns that are open: who waits for one completion gets the one with text."""
        events: list[Event] = []
        while self._unanswered and not self._turns:
            self._unanswered -= 1
            turn = Turn(self._writer.new_id("item"))
            events += self._committed(turn)
            events.append(self._completed(turn, TurnCompleted(-1, "", 0.0, None)))
        return events

    def _mistake(self, error: SplitscribeError, event_id: str | None) -> list[Event]:
        self._mistakes += 1
        if self._mistakes > MAX_MISTAKES:
            raise TooManyMistakesError(
                f"more than {MAX_MISTAKES} events of this session were wrong; the last: "
                f"{error.message}"
            )
        return [self._writer.error(error, event_id)]

    def _written(self) -> dict[str, Any]:
        write = as_session if self._writer.form == "ga" else as_beta_session
        return write(self.config, self.session_id, self._expires_at)

    # ---- what the engine tells ----

    def tell(self, event: LiveEvent) -> list[Event]:
        """What the client hears of an event of the engine."""
        turn, write = self._known(event.turn), self._writer
        match event:
            case SpeechStarted(_, audio_start_ms):
                return [self._buffer("speech_started", turn, audio_start_ms=audio_start_ms)]
            case SpeechStopped(_, audio_end_ms):
                return [self._buffer("speech_stopped", turn, audio_end_ms=audio_end_ms)]
            case IdleTimeout(_, start_ms, end_ms):
                return [
                    self._buffer(
                        "timeout_triggered", turn, audio_start_ms=start_ms, audio_end_ms=end_ms
                    )
                ]
            case TurnCommitted():
                return self._committed(turn)
            case TextDelta(_, text, logprobs):
                fields = self._logprobs(logprobs)
                return [write.transcription("delta", turn.item_id, delta=text, **fields)]
            case TurnSegment(_, text, start_s, end_s):
                segment = {
                    "id": write.new_id("seg"),
                    "text": text,
                    "speaker": "",
                    "start": round(start_s, 3),
                    "end": round(end_s, 3),
                }
                return [write.transcription("segment", turn.item_id, **segment)]
            case TurnCompleted() | TurnFailed():
                del self._turns[event.turn]
                return [*self._ended(turn, event), *self._answer_empty_commits()]
        raise AssertionError(f"no event of an engine: {event!r}")

    def fail_open_turns(self, error: SplitscribeError) -> list[Event]:
        """End every item that is open; for an engine that can no longer tell of them."""
        events: list[Event] = []
        for number in sorted(self._turns):
            events += self.tell(TurnFailed(number, error))
        return events

    def _known(self, number: int) -> Turn:
        """The engine's turn of this number, which is an item from now on."""
        if number not in self._turns:
            self._turns[number] = Turn(self._writer.new_id("item"))
        return self._turns[number]

    def _ended(self, turn: Turn, event: TurnCompleted | TurnFailed) -> list[Event]:
        # A turn that was cleared ends without a commit; its item is one all the same.
        events = [] if turn.committed else self._committed(turn)
        if isinstance(event, TurnCompleted):
            events.append(self._completed(turn, event))
        else:
            error = error_fields(event.error)
            events.append(self._writer.transcription("failed", turn.item_id, error=error))
        return events

    def _committed(self, turn: Turn) -> list[Event]:
        previous, self._last_item = self._last_item, turn.item_id
        turn.committed = True
        return [
            self._buffer("committed", turn, previous_item_id=previous),
            *self._writer.item(turn.item_id, previous),
        ]

    def _completed(self, turn: Turn, event: TurnCompleted) -> Event:
        fields = self._logprobs(event.logprobs)
        if event.language is not None:
            fields["languages"] = [{"code": event.language}]
        return self._writer.transcription(
            "completed",
            turn.item_id,
            transcript=event.text,
            usage={"type": "duration", "seconds": round(event.audio_s, 3)},
            **fields,
        )

    def _buffer(self, kind: str, turn: Turn, **fields: Any) -> Event:
        return self._writer.event(f"input_audio_buffer.{kind}", item_id=turn.item_id, **fields)

    def _logprobs(self, logprobs: Any) -> dict[str, Any]:
        return {"logprobs": written_logprobs(logprobs)} if self.config.live.logprobs else {}
