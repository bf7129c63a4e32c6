"""What a live session is configured by, and the events that it tells: frozen values.

`router.http` and `router.live.protocol` use `router.live.session`, which knows nothing of OpenAI's
events or their JSON, by these. The words are explained in `router.live`.

Turns are numbered from 0 on, in the order of their audio. The events of one turn come in this
order; those in brackets do not come for every turn:

    [SpeechStarted] (TextDelta | TurnSegment)* [SpeechStopped] [TurnCommitted]
    (TextDelta | TurnSegment)* (TurnCompleted | TurnFailed)

Every announced turn ends with exactly one `TurnCompleted` or `TurnFailed`. Deltas are never taken
back: joined, they are the text of `TurnCompleted`, also if a worker died. The next turn may start,
and get deltas, before the last one is completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.common.errors import SplitscribeError
from router.transcript import TokenLogprob

Eagerness = Literal["low", "medium", "high", "auto"]
Delay = Literal["minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True, slots=True)
class ServerVad:
    """A turn ends after a fixed time of silence.

    threshold: probability from which a VAD frame counts as speech, 0 to 1.
    prefix_padding_ms: audio before the speech that belongs to the turn.
    silence_duration_ms: silence that ends a turn.
    idle_timeout_ms: silence after a turn, or after the session's start, after which `IdleTimeout`
        is sent; None: it is never sent.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SemanticVad:
    """A turn ends soon after a finished sentence, and later after an unfinished one.

    eagerness: how much silence ends a turn after an unfinished sentence: low 8 s, medium and auto
        4 s, high 2 s.
    """

    eagerness: Eagerness = "auto"


TurnDetection = ServerVad | SemanticVad | None  # None: turns end by `LiveSession.commit` alone


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """How a session is transcribed.

    model: the name that the client used; it chooses nothing in the engine.
    language: code such as "en"; None: it is detected anew for each turn.
    languages: codes among which it is detected; empty: all.
    prompt: text that the decoder takes for what was said before. keywords: words to expect.
    delay: how long words may be held back for better accuracy; None: the server's default.
    turn_detection: what ends a turn; None: the client's commits alone.
    logprobs: send the log probabilities of tokens with deltas and completions.
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
    """Speech began. audio_start_ms: where the turn's audio begins, with its padding, in ms from the
    session's start."""

    turn: int
    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """Silence has ended the turn. audio_end_ms: where the turn's audio ends, in ms from the
    session's start."""

    turn: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete: by silence, or by `LiveSession.commit`."""

    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is appended to the turn's earlier deltas; never empty. logprobs: of its tokens,
    empty unless they were asked for."""

    turn: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """A segment of the turn's text with its times, sent after the deltas with its text. start_s,
    end_s: seconds from the beginning of the turn's audio."""

    turn: int
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The turn is transcribed. text: all its deltas joined; empty if nothing was said. audio_s:
    length of its audio. language: code that was given or detected; None if nothing was decoded."""

    turn: int
    text: str
    audio_s: float
    language: str | None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The turn could not be transcribed to its end. The deltas that were sent remain valid."""

    turn: int
    error: SplitscribeError


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Nobody spoke for `ServerVad.idle_timeout_ms`. Sent once for each silence. The turn is empty:
    a `TurnCommitted` and a `TurnCompleted` without text follow. audio_start_ms, audio_end_ms: the
    silence, in ms from the session's start."""

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
