"""The configuration of a live session, and the events that it sends, as frozen values.

Turns are numbered from 0 in the order of their audio. The events of one turn come in this order
(those in brackets are optional):

    [SpeechStarted] (TextDelta | TurnSegment)* [SpeechStopped] [TurnCommitted]
    (TextDelta | TurnSegment)* (TurnCompleted | TurnFailed)

Every announced turn ends with exactly one `TurnCompleted` or `TurnFailed`. Deltas are final: they
join to the text of `TurnCompleted`. The next turn may start before the last one is completed.
Fields that end in `_ms` count from the session's start.
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
    threshold: float = 0.5  # probability from which a VAD frame counts as speech
    prefix_padding_ms: int = 300  # audio before the speech that belongs to the turn
    silence_duration_ms: int = 500  # silence that ends a turn
    idle_timeout_ms: int | None = None  # only echoed: it triggers responses, which we do not have


@dataclass(frozen=True, slots=True)
class SemanticVad:
    """A turn ends after a short silence if its sentence is complete, else after a longer one."""

    eagerness: Eagerness = "auto"


TurnDetection = ServerVad | SemanticVad | None  # None: turns end only by `LiveSession.commit`


@dataclass(frozen=True, slots=True)
class LiveConfig:
    model: str = ""  # the client's name of it; the engine does not choose by it
    language: str | None = None  # code; None: detected anew for each turn
    languages: tuple[str, ...] = ()  # codes to choose from at detection; empty: all
    prompt: str = ""  # text that precedes the audio
    keywords: tuple[str, ...] = ()  # hotwords
    delay: Delay | None = None  # how long words may be held back; None: the server's default
    turn_detection: TurnDetection = ServerVad()
    logprobs: bool = False  # send tokens' log probabilities with deltas and completions
    diarize: bool = False  # label segments with speakers


def wants_speakers(config: LiveConfig) -> bool:
    return config.diarize or config.model == DIARIZING_MODEL


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    turn: int
    audio_start_ms: int  # padding included


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    turn: int
    audio_end_ms: int  # where the turn's audio ends


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete, by silence or by `LiveSession.commit`."""

    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    turn: int
    text: str  # appended to the turn's earlier deltas; never empty
    logprobs: tuple[TokenLogprob, ...] = ()  # empty unless the session asked for them


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """A segment of the turn's text, sent after the deltas with its text."""

    turn: int
    text: str
    start_s: float  # from the beginning of the turn's audio
    end_s: float
    speaker: str | None = ""  # empty: not requested; None: not known yet


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    turn: int
    text: str  # all deltas joined; empty if nothing was said
    audio_s: float
    language: str | None  # None if nothing was decoded
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """Deltas that were sent remain valid."""

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
