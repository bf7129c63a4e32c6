"""A session's audio, and the turns and stretches that it is divided into.

All positions are samples from the session's start (16 kHz). A **turn** is what the client gets as
one item. A **stretch** is a piece of a turn that holds speech and is decoded as one window that
grows: from the last cut to the newest audio. Plain values without any rules: `router.live.listener`
makes them, `router.live.session` turns stretches into text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cluster.errors import SplitscribeError
from cluster.messages import SAMPLE_RATE, Pcm
from cluster.tracing import NO_SPAN, Span
from router.live.interface import LiveConfig
from router.live.text import TurnText


def seconds(n_samples: int) -> float:
    return n_samples / SAMPLE_RATE


def samples(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE)


def milliseconds(n_samples: int) -> int:
    return n_samples * 1000 // SAMPLE_RATE


class AudioBuffer:
    """The audio that may still be decoded."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._chunks: deque[Pcm] = deque()

    def append(self, pcm: Pcm) -> None:
        self._chunks.append(pcm)
        self.end += int(pcm.shape[0])

    def span(self, first: int, last: int) -> Pcm:
        """A copy of the samples from `first` to `last`, which must be there still."""
        assert self.start <= first <= last <= self.end, (self.start, first, last, self.end)
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks.clear()
            self._chunks.append(joined)
        chunk = self._chunks[0] if self._chunks else np.empty(0, np.int16)
        return chunk[first - self.start : last - self.start].copy()

    def drop_before(self, first: int) -> None:
        """Forget whole chunks that end before `first`."""
        while self._chunks and self.start + self._chunks[0].shape[0] <= first:
            self.start += int(self._chunks.popleft().shape[0])
        if self._chunks and first - self.start > 4 * SAMPLE_RATE:  # one long chunk
            self._chunks[0] = self._chunks[0][first - self.start :].copy()
            self.start = first


@dataclass(eq=False, slots=True)
class Turn:
    """One item of a session.

    end: where its audio ends, once that is known. cut_at: where its last stretch was cut, and
    spoken_to: where the speech in that ended.
    language: of its text, once some of it is certain.
    error: why a part of it could not be decoded; it ends with that.
    is_told: something was told of it, so that its end must be told as well.
    is_dropped: its audio was cleared; what is still decoded for it is not told.
    span: of its trace, which whoever tells its end ends.
    """

    number: int
    start: int
    config: LiveConfig
    text: TurnText
    end: int | None = None
    cut_at: int = 0
    spoken_to: int = 0
    language: str | None = None
    error: SplitscribeError | None = None
    is_told: bool = False
    is_dropped: bool = False
    span: Span = NO_SPAN

    def configure(self, config: LiveConfig) -> None:
        """Take another configuration; only while there is no text."""
        self.config = config
        self.text.tells_logprobs = config.logprobs


@dataclass(eq=False, slots=True)
class Stretch:
    """Audio with speech between two cuts.

    end: where it was cut; None while it grows. ends_turn: with it the turn's audio ends.
    speech: the runs of speech in it as (first, last); the last one may still grow.
    seen_to: where the audio of the last update ended.
    """

    turn: Turn
    start: int
    end: int | None = None
    ends_turn: bool = False
    speech: list[tuple[int, int]] = field(default_factory=list)
    seen_to: int = 0

    def __post_init__(self) -> None:
        self.seen_to = max(self.seen_to, self.start)

    @property
    def speech_end(self) -> int:
        """Where its last speech ends so far; its start where there is none."""
        return self.speech[-1][1] if self.speech else self.start

    def hear(self, first: int, last: int) -> None:
        """Note speech from `first` to `last`, behind or beside what was heard."""
        if self.speech and first <= self.speech[-1][1]:
            self.speech[-1] = (self.speech[-1][0], max(last, self.speech[-1][1]))
        else:
            self.speech.append((first, last))

    def speech_after(self, at: int) -> list[tuple[int, int]]:
        """The runs of speech, or parts of them, behind a sample."""
        return [(max(first, at), last) for first, last in self.speech if last > at]

    def speech_before(self, at: int) -> list[tuple[int, int]]:
        """The runs of speech, or parts of them, in front of a sample."""
        return [(first, min(last, at)) for first, last in self.speech if first < at]
