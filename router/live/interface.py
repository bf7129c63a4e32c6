"""What the realtime protocol asks of live transcription, and what it is told of it.

`router.http` and the protocol's modules use a `LiveEngine`, one for each model; tests have one that
needs no workers. Frozen values and protocols only: nothing here does any work, and nothing here
knows OpenAI's events or their JSON.

A **turn** is what OpenAI calls an item: a stretch of a session's audio that is transcribed
together. Turns are numbered from 0 on in the order of their audio. What is told of one turn comes
in this order, the parts in brackets only where they apply:

    [SpeechStarted] (TextDelta | TurnSegment)* [SpeechStopped] [TurnCommitted]
    (TextDelta | TurnSegment)* (TurnCompleted | TurnFailed)

Every turn of which anything was told ends with exactly one `TurnCompleted` or `TurnFailed`. Deltas
are never taken back: joined, they are the text of `TurnCompleted`, also where a worker died. The
next turn may start, and get deltas, before the last one is completed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.errors import SplitscribeError
from cluster.messages import Pcm
from router.transcript import TokenLogprob

Eagerness = Literal["low", "medium", "high", "auto"]
Delay = Literal["minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True, slots=True)
class ServerVad:
    """A turn ends after a fixed time of silence.

    threshold: probability of speech from which a frame counts as speech, 0 to 1.
    prefix_padding_ms: audio before the speech that belongs to the turn.
    silence_duration_ms: silence that ends a turn.
    idle_timeout_ms: silence after a turn, or after the session's start, that is reported by
        `IdleTimeout`; None: it is not.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SemanticVad:
    """A turn ends soon after a finished sentence, and later after an unfinished one.

    eagerness: the longest silence that an unfinished sentence may hold: low 8 s, medium and auto
        4 s, high 2 s.
    """

    eagerness: Eagerness = "auto"


TurnDetection = ServerVad | SemanticVad | None  # None: turns end by `LiveSession.commit` alone


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """How a session is transcribed.

    model: the name that the client used; it chooses nothing in the engine.
    language: code such as "en"; None: detected anew for each turn.
    languages: codes among which it is detected; empty: all.
    prompt: text that the decoder takes for what was said before. keywords: words to expect.
    delay: how long words may wait in exchange for accuracy; None: the server's setting.
    logprobs: tell the log probabilities of tokens with deltas and completions.
    """

    model: str = ""
    language: str | None = None
    languages: tuple[str, ...] = ()
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    delay: Delay | None = None
    turn_detection: TurnDetection = ServerVad()
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech began. audio_start_ms: where the turn's audio begins (padding included), in ms of all
    audio that was appended in the session."""

    turn: int
    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The silence that ends the turn has passed. audio_end_ms: where the turn's audio ends, in ms
    of all audio that was appended in the session."""

    turn: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete, by its silence or by `LiveSession.commit`."""

    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that follows the turn's deltas before; never empty. logprobs: of the tokens behind it,
    empty unless they were asked for."""

    turn: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """A piece of the turn's text that will not change, told after its deltas. start_s, end_s: in
    seconds from the beginning of the turn's audio."""

    turn: int
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The end of a turn. text: all its deltas joined; empty where nothing was said. audio_s: of the
    turn. language: code that was given or detected; None where nothing was decoded."""

    turn: int
    text: str
    audio_s: float
    language: str | None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The end of a turn that could not be transcribed to its end. Its deltas stand."""

    turn: int
    error: SplitscribeError


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Nobody spoke for `ServerVad.idle_timeout_ms`. Told once for each silence. The turn is empty:
    a `TurnCommitted` and a `TurnCompleted` without text follow. The span is in ms of the
    session's audio."""

    turn: int
    audio_start_ms: int
    audio_end_ms: int


LiveEvent = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TextDelta
    | TurnSegment
    | TurnCompleted
    | TurnFailed
    | IdleTimeout
)


class LiveSession(Protocol):
    """One connection's audio on its way to text. To be used from the event loop only.

    No method but `drain` and `close` waits. After `drain` or `close` audio is ignored.
    """

    def configure(self, config: LiveConfig) -> None:
        """Replace the configuration: turn detection for the audio that follows, all else from the
        next turn on (from this one where it has no text yet)."""

    def append(self, pcm: Pcm) -> None:
        """Take audio: int16 [n_samples], 16 kHz mono, any length. The caller keeps `unsent_s`
        bounded."""

    def commit(self) -> int | None:
        """End the turn here. Returns its number, for which `TurnCommitted` follows; None where no
        audio was appended since the last turn was committed, or where all of it is silence that
        the turn detection has left out: nothing is told then."""

    def clear(self) -> None:
        """Forget the audio of the turn that is not committed yet. If anything was told of the turn,
        it ends with `TurnCompleted` of the text that was told."""

    @property
    def unsent_s(self) -> float:
        """Seconds of audio that were appended and are not yet transcribed."""

    def events(self) -> AsyncIterator[LiveEvent]:
        """What is told, in order; to be iterated once, by one task. Ends after `drain` or `close`.

        The queue behind it is not bounded by count, but by the audio: text is a few bytes for each
        second of it."""

    async def drain(self) -> None:
        """Commit the turn that is open, wait until every turn has ended, and end `events`."""

    async def close(self) -> None:
        """End at once: cancel all that runs for this session, and end `events`. May be called
        more than once, and after `drain`."""


class LiveEngine(Protocol):
    """Transcribes all live sessions of this process with one model."""

    def open(self, config: LiveConfig, *, session_id: str, owner: bytes = b"") -> LiveSession:
        """Begin a session.

        Args:
            session_id: names it in logs and traces, and its windows at the workers.
            owner: whose audio it is, as in `router.interface.RequestContext`.

        Raises:
            OverloadedError: updates are already as rare as the settings allow.
        """

    async def close(self) -> None:
        """Close every session, and end what runs for all of them together."""
