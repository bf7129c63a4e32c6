"""What a transcript is made of: words, segments, windows, and the whole. Frozen values.

Times are seconds from the start of the upload. Knows neither where they come from
(`router.transcript_builder` makes them) nor how they are written (`router.api`).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.messages import Task, TokenAlignment


@dataclass(frozen=True, slots=True)
class Word:
    """One word as spoken, with its leading space and its punctuation. Times in s of the upload.

    speaker: None where speakers are not told apart, or nobody was found.
    """

    start: float
    end: float
    word: str
    probability: float
    speaker: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One text token as a client sees it; `token` has U+FFFD where it is part of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech. Times are seconds from the start of the upload.

    seek: mel frame at which the window began; text keeps its leading space; tokens include
    the timestamps around it, logprobs are theirs; the four scores belong to the whole window;
    words: empty unless they were asked for; speaker: as of `Word`, and then of all its words.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    logprobs: tuple[float, ...] = ()
    words: tuple[Word, ...] = ()
    speaker: str | None = None


@dataclass(frozen=True, slots=True)
class WindowTranscript:
    """One window's segments (none for silence), and what its decoder took the language for.

    segments: all pieces between timestamps, empty ones too, with unrounded times.
    undecoded_s: where the last closed segment ends, if the decoder stopped there with the rest of
        the window undecoded; None when it came to the window's end.
    has_tail: text stands behind that segment: in none, or in the last one where it is sent.
    is_sent: its text may have been sent token by token, so all of it stays.
    """

    offset_s: float
    duration_s: float
    language: str
    segments: tuple[Segment, ...]
    alignment: TokenAlignment | None = None
    undecoded_s: float | None = None
    has_tail: bool = False
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class HeardPart:
    """A part of window `window` as it was transcribed, for who looks at its audio again.

    segments: of `part`, with their words, and bounds set by them. last_speech_s: where the speech
    before it ended.
    """

    window: int
    part: WindowTranscript
    segments: tuple[Segment, ...]
    last_speech_s: float


@dataclass(frozen=True, slots=True)
class AlignedWord:
    """A word of a text that was known. line: its number; time: None where there is no audio."""

    text: str
    line: int
    time: Word | None


@dataclass(frozen=True, slots=True)
class HeardAlone:
    """What was heard where the text that was known has nothing. Times in s of the upload."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Alignment:
    """A text that was known, in lines, and where its words are said."""

    lines: tuple[str, ...]
    words: tuple[AlignedWord, ...]
    heard_alone: tuple[HeardAlone, ...]


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel of a file. speaker: None where it was not transcribed.

    same_as: the earlier channel, from 1, that sounds the same; None without one, and then a channel
        without a speaker is silent.
    """

    channel: int
    speaker: str | None = None
    same_as: int | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole upload as text. `language` is a code such as "en"; `duration_s` is the audio's.

    alignment: of a text that was known, whose lines are then the segments. channels: of the file,
    where each was transcribed by itself.
    """

    task: Task
    language: str
    duration_s: float
    text: str
    segments: tuple[Segment, ...]
    alignment: Alignment | None = None
    channels: tuple[Channel, ...] = ()

    @property
    def transcribed_s(self) -> float:
        """Seconds of audio that the work was: of all channels that were transcribed."""
        n_heard = sum(channel.speaker is not None for channel in self.channels)
        return self.duration_s * max(1, n_heard)

    @property
    def words(self) -> tuple[Word, ...]:
        return tuple(word for segment in self.segments for word in segment.words)
