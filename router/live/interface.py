"""The configuration of a live session, and the events that it sends: frozen values.

Turns are numbered from 0 on, in the order of their audio. The events of one turn come in this
order; those in brackets do not come for every turn:

    [SpeechStarted] (TextDelta | TurnSegment)* [SpeechStopped] [TurnCommitted]
    (TextDelta | TurnSegment)* (TurnCompleted | TurnFailed)

Every announced turn ends with exactly one `TurnCompleted` or `TurnFailed`. Deltas are never taken
back: joined, they are the text of `TurnCompleted`, also if a worker died. The next turn may start,
and get deltas, before the last one is completed. `_ms` count from the session's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.common.errors import SplitscribeError
from router.transcript import TokenLogprob

Eagerness = Literal["low", "medium", "high", "auto"]
DIARIZING_MODEL = "gpt-4o-transcribe-diarize"
Delay = Literal["minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True, slots=True)
class ServerVad:
    """A turn ends after a fixed time of silence."""

    threshold: float = 0.5  # probability from which a VAD frame counts as speech
    prefix_padding_ms: int = 300  # before the speech
    silence_duration_ms: int = 500  # that ends a turn
    idle_timeout_ms: int | None = None  # only repeated: it triggers answers, and here are none


@dataclass(frozen=True, slots=True)
class SemanticVad:
    """A turn ends soon after a finished sentence, later after another (`SEMANTIC_S`)."""

    eagerness: Eagerness = "auto"


TurnDetection = ServerVad | SemanticVad | None  # None: turns end by `LiveSession.commit` alone


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """How a session is transcribed."""

    model: str = ""  # as the client named it; it chooses nothing in the engine
    language: str | None = None  # code; None: detected anew for each turn
    languages: tuple[str, ...] = ()  # codes among which it is detected; empty: all
    prompt: str = ""  # taken for what was said before
    keywords: tuple[str, ...] = ()  # words to expect
    delay: Delay | None = None  # how long words may be held back; None: the server's default
    turn_detection: TurnDetection = ServerVad()
    logprobs: bool = False  # of tokens, with deltas and completions
    diarize: bool = False  # segments have speakers


def wants_speakers(config: LiveConfig) -> bool:
    """By the field, or by the name of the model."""
    return config.diarize or config.model == DIARIZING_MODEL


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    turn: int
    audio_start_ms: int  # with the turn's padding


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    turn: int
    audio_end_ms: int  # where the turn's audio ends


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete: by silence, or by `LiveSession.commit`."""

    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    turn: int
    text: str  # appended to the turn's earlier deltas; never empty
    logprobs: tuple[TokenLogprob, ...] = ()  # where asked for


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """A segment of the turn's text, after the deltas with its text."""

    turn: int
    text: str
    start_s: float  # from the beginning of the turn's audio
    end_s: float
    speaker: str | None = ""  # empty: not asked for; None: not known yet


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    turn: int
    text: str  # all deltas joined; empty if nothing was said
    audio_s: float
    language: str | None  # None if nothing was decoded
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The deltas that were sent remain valid."""

    turn: int
    error: SplitscribeError


LiveEvent = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TextDelta
    | TurnSegment
    | TurnCompleted
    | TurnFailed
)
