"""The parts of a transcript. Times are seconds from the start of the upload."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.messages import Task, TokenAlignment


@dataclass(frozen=True, slots=True)
class Word:
    start: float
    end: float
    word: str  # with its leading space and its punctuation
    probability: float
    speaker: str | None = None  # None: not requested, or nobody found


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str  # U+FFFD where it is part of a character
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech. The four scores belong to the whole window."""

    id: int
    seek: int  # mel frame at which the window began
    start: float
    end: float
    text: str  # keeps its leading space
    tokens: tuple[int, ...]  # with the timestamps around it
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    logprobs: tuple[float, ...] = ()  # of `tokens`
    words: tuple[Word, ...] = ()  # empty unless asked for
    speaker: str | None = None  # of all its words


@dataclass(frozen=True, slots=True)
class WindowTranscript:
    offset_s: float
    duration_s: float
    language: str
    segments: tuple[Segment, ...]  # all pieces, with unrounded times; none for silence
    alignment: TokenAlignment | None = None
    undecoded_s: float | None = None  # where the decoder stopped before the window's end
    has_tail: bool = False  # text stands behind the last closed segment


@dataclass(frozen=True, slots=True)
class HeardPart:
    """A transcribed part of a window, kept to look at its audio again."""

    window: int  # its index
    part: WindowTranscript
    segments: tuple[Segment, ...]  # of `part`, with words, which set their bounds
    last_speech_s: float  # where the speech before it ended


@dataclass(frozen=True, slots=True)
class AlignedWord:
    text: str
    line: int  # line number
    time: Word | None  # None where there is no audio


@dataclass(frozen=True, slots=True)
class HeardAlone:
    """Speech that the known text does not have."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Alignment:
    lines: tuple[str, ...]
    words: tuple[AlignedWord, ...]
    heard_alone: tuple[HeardAlone, ...]


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel of a file. Without `speaker` and `same_as` it is silent."""

    channel: int
    speaker: str | None = None  # None where it was not transcribed
    same_as: int | None = None  # the earlier channel, from 1, that sounds the same


@dataclass(frozen=True, slots=True)
class Transcript:
    task: Task
    language: str  # a code such as "en"
    duration_s: float
    text: str
    segments: tuple[Segment, ...]
    alignment: Alignment | None = None  # with a known text, whose lines are the segments
    channels: tuple[Channel, ...] = ()  # if each was transcribed separately

    @property
    def transcribed_s(self) -> float:
        """Seconds of transcribed audio, summed over its channels."""
        n_heard = sum(channel.speaker is not None for channel in self.channels)
        return self.duration_s * max(1, n_heard)

    @property
    def words(self) -> tuple[Word, ...]:
        return tuple(word for segment in self.segments for word in segment.words)
