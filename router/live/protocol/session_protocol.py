"""Implements one realtime session as a state machine without I/O: events of the client and of the
engine go in, events for the client come out.

Every announced item ends with exactly one `completed` or `failed` event. Errors are sent only for
mistakes that the client must know of, since many clients fail on any error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.api.formats import logprob_bodies
from router.api.responses import error_body
from router.live.interface import (
    LiveConfig,
    LiveEvent,
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
    InvalidEvent,
    RealtimeWriter,
    SessionUpdate,
)
from router.live.protocol.session_config import ModelNames, SessionConfig, as_session, updated
from router.live.session import LiveSession

HELD_S = 1.0  # longest audio that is held back until the session is configured
MAX_MISTAKES = 100  # invalid events after which the session is closed

OpenSession = Callable[[LiveConfig], LiveSession]


class TooManyMistakesError(InvalidRequestError):
    pass


@dataclass(slots=True)
class Item:
    item_id: str
    committed: bool = False  # the `committed` event was sent


class LiveProtocol:
    """Calls `open_session` again if the client names another model before it sends audio."""

    def __init__(
        self,
        config: SessionConfig,
        *,
        names: ModelNames,
        open_session: OpenSession,
        writer: RealtimeWriter,
        expires_at: int,
        is_configured: bool = False,
    ) -> None:
        """is_configured: the client secret has a configuration, so no audio is held back."""
        self.config = config
        self.session_id = writer.new_id("sess")
        self.session = open_session(config.live)
        self._names = names
        self._open_session = open_session
        self.writer = writer
        self._expires_at = expires_at
        self._decoder = StreamDecoder(config.audio)
        self._held_audio: list[Pcm] | None = None if is_configured else []
        self._has_audio = False
        self._open_items: dict[int, Item] = {}  # announced and not ended, by the number of the turn
        self._last_item: str | None = None
        self._empty_commits = 0  # unanswered commits without audio
        self._replaced: list[LiveSession] = []
        self._mistakes = 0
        self.completed_s = 0.0  # audio of completed turns, in seconds

    # ---- what the client sends ----

    def open(self) -> list[Event]:
        return [self.writer.event("session.created", session=self._written())]

    def receive(self, event: ClientEvent) -> list[Event]:
        """Return the engine's events before this one, the answer, and the engine's events after it.

        Raises TooManyMistakesError.
        """
        return [*self._engine_events(), *self._answer(event), *self._engine_events()]

    def _engine_events(self) -> list[Event]:
        waiting = self.session.take_events()
        return [event for each in waiting for event in self.on_engine_event(each)]

    def _answer(self, event: ClientEvent) -> list[Event]:
        match event:
            case SessionUpdate():
                return self._update(event)
            case Append():
                self._give(self._decoder.decode(event.audio))
                return []
            case Commit():
                return self._commit()
            case Clear():
                self._release_held()
                self._decoder = StreamDecoder(self.config.audio)
                self.session.clear()
                return [self.writer.event("input_audio_buffer.cleared")]
            case InvalidEvent():
                return self._mistake(event.error, event.event_id)
        raise AssertionError(f"not an event of a client: {event!r}")

    def audio_s(self, event: ClientEvent) -> float:
        return len(event.audio) / self.config.audio.bytes_per_s if isinstance(event, Append) else 0

    @property
    def unsent_s(self) -> float:
        return self.session.unsent_s

    def take_replaced(self) -> Sequence[LiveSession]:
        """Return the engine's sessions that are no longer used; the caller closes them."""
        taken, self._replaced = self._replaced, []
        return taken

    def _update(self, event: SessionUpdate) -> list[Event]:
        try:
            config = updated(self.config, event.session, self._names)
            self._configure(config)
        except SplitscribeError as error:
            return self._mistake(error, event.event_id)
        self._release_held()
        return [self.writer.event("session.updated", session=self._written())]

    def _configure(self, config: SessionConfig) -> None:
        before = self.config
        if not self._names.are_one(before.live.model, config.live.model):
            if self._has_audio:
                raise InvalidRequestError(
                    "The model of a session cannot be changed after audio was sent. Open another "
                    "session for another model.",
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
            self._give(self._decoder.flush())
            self._decoder = StreamDecoder(config.audio)

    def _give(self, audio: Iterable[Pcm]) -> None:
        for pcm in audio:
            if self._held_audio is None:
                self._has_audio = True
                self.session.append(pcm)
                continue
            self._held_audio.append(pcm)
            if sum(map(len, self._held_audio)) > HELD_S * SAMPLE_RATE:
                self._release_held()

    def _release_held(self) -> None:
        held, self._held_audio = self._held_audio, None
        self._give(held or ())

    def _commit(self) -> list[Event]:
        self._release_held()
        self._give(self._decoder.flush())
        if (number := self.session.commit()) is not None:
            self._item_of(number)  # announced now: another commit may precede the engine's event
            return []
        # No error: clients also commit what turn detection has committed, and wait for an answer.
        self._empty_commits += 1
        return self._answer_empty_commits()

    def _answer_empty_commits(self) -> list[Event]:
        """Answer only when no item is open: a client may take the next completion for its text."""
        events: list[Event] = []
        while self._empty_commits and not self._open_items:
            self._empty_commits -= 1
            item = Item(self.writer.new_id("item"))
            events += self._committed(item)
            events.append(self._completed(item, TurnCompleted(-1, "", 0.0, None)))
        return events

    def _mistake(self, error: SplitscribeError, event_id: str | None) -> list[Event]:
        self._mistakes += 1
        if self._mistakes > MAX_MISTAKES:
            raise TooManyMistakesError(
                f"more than {MAX_MISTAKES} events of this session were wrong; the last error was: "
                f"{error.message}"
            )
        return [self.writer.error(error, event_id)]

    def _written(self) -> dict[str, Any]:
        return as_session(self.config, self.session_id, self._expires_at)

    # ---- what the engine sends ----

    def on_engine_event(self, event: LiveEvent) -> list[Event]:
        item, write = self._item_of(event.turn), self.writer
        match event:
            case SpeechStarted(_, start_ms):
                return [self._buffer("speech_started", item, audio_start_ms=start_ms)]
            case SpeechStopped(_, end_ms):
                return [self._buffer("speech_stopped", item, audio_end_ms=end_ms)]
            case TurnCommitted():
                return self._committed(item)
            case TextDelta(_, text, logprobs):
                fields = self._logprobs(logprobs)
                return [write.transcription("delta", item.item_id, delta=text, **fields)]
            case TurnSegment(_, text, start_s, end_s, speaker):
                segment = {
                    "id": write.new_id("seg"),
                    "text": text,
                    "speaker": speaker,
                    "start": round(start_s, 3),
                    "end": round(end_s, 3),
                }
                return [write.transcription("segment", item.item_id, **segment)]
            case TurnCompleted() | TurnFailed():
                del self._open_items[event.turn]
                # A cleared turn ends without a commit, but the client knows its item.
                events = [] if item.committed else self._committed(item)
                if isinstance(event, TurnCompleted):
                    events.append(self._completed(item, event))
                else:
                    fields = error_body(event.error)  # {"error": ...}
                    events.append(write.transcription("failed", item.item_id, **fields))
                return [*events, *self._answer_empty_commits()]
        raise AssertionError(f"not an event of an engine: {event!r}")

    def fail_open_items(self, error: SplitscribeError) -> list[Event]:
        """Used when the engine sends no more events."""
        ends = [TurnFailed(number, error) for number in sorted(self._open_items)]
        return [event for end in ends for event in self.on_engine_event(end)]

    def _item_of(self, number: int) -> Item:
        if number not in self._open_items:
            self._open_items[number] = Item(self.writer.new_id("item"))
        return self._open_items[number]

    def _committed(self, item: Item) -> list[Event]:
        previous, self._last_item = self._last_item, item.item_id
        item.committed = True
        return [
            self._buffer("committed", item, previous_item_id=previous),
            *self.writer.item(item.item_id, previous),
        ]

    def _completed(self, item: Item, event: TurnCompleted) -> Event:
        self.completed_s += event.audio_s
        fields = self._logprobs(event.logprobs)
        if event.language is not None:
            fields["languages"] = [{"code": event.language}]
        return self.writer.transcription(
            "completed",
            item.item_id,
            transcript=event.text,
            usage={"type": "duration", "seconds": round(event.audio_s, 3)},
            **fields,
        )

    def _buffer(self, kind: str, item: Item, **fields: Any) -> Event:
        return self.writer.event(f"input_audio_buffer.{kind}", item_id=item.item_id, **fields)

    def _logprobs(self, logprobs: Any) -> dict[str, Any]:
        return {"logprobs": logprob_bodies(logprobs)} if self.config.live.logprobs else {}
