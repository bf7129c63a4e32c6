"""A session's audio, the turns and utterances into which it is divided, and the text of turns.

Places in the audio are samples from the session's start (16 kHz). These are plain values without
rules: `router.live.turn_detector` makes them, and `router.live.session` turns utterances into text.

Confirmed tokens become deltas, and no delta is ever taken back. A delta holds whole characters
only. The text of a turn has no space at its beginning and its end, as in a transcript: a space at
the end of one delta is sent with the next.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.tracing import NO_SPAN, Span
from router.live.interface import LiveConfig, TextDelta
from router.transcript import TokenLogprob

QUIET_SAMPLES = SAMPLE_RATE * 3 // 50  # 60 ms, over which loudness is measured


def seconds(n_samples: int) -> float:
    return n_samples / SAMPLE_RATE


def samples(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE)


def milliseconds(n_samples: int) -> int:
    return n_samples * 1000 // SAMPLE_RATE


def quietest(audio: Pcm, first: int, last: int) -> tuple[int, float]:
    """The middle of the quietest 60 ms between two samples of `audio`, and their energy.

    Among equally quiet places, the latest is taken. If the span is shorter than 60 ms, the result
    is its first sample with an infinite energy.
    """
    last = min(last, int(audio.shape[0]) - QUIET_SAMPLES)
    if last <= first:
        return max(0, min(first, int(audio.shape[0]))), float("inf")
    span = audio[first : last + QUIET_SAMPLES].astype(np.float64)
    power = np.concatenate(([0.0], np.cumsum(np.square(span))))
    level = power[QUIET_SAMPLES:] - power[:-QUIET_SAMPLES]
    latest = int(level.shape[0]) - 1 - int(np.argmin(level[::-1]))
    return first + latest + QUIET_SAMPLES // 2, float(level[latest])


class AudioBuffer:
    """The audio that may still be decoded.

    start, end: the samples between which it lies.
    """

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._chunks: deque[Pcm] = deque()

    def append(self, pcm: Pcm) -> None:
        self._chunks.append(pcm)
        self.end += int(pcm.shape[0])

    def span(self, first: int, last: int) -> Pcm:
        """A copy of the samples from `first` to `last`, int16; they must still be there."""
        assert self.start <= first <= last <= self.end, (self.start, first, last, self.end)
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks.clear()
            self._chunks.append(joined)
        chunk = self._chunks[0] if self._chunks else np.empty(0, np.int16)
        return chunk[first - self.start : last - self.start].copy()

    def drop_before(self, first: int) -> None:
        """Drop audio before sample `first`, in whole chunks where these are short."""
        while self._chunks and self.start + self._chunks[0].shape[0] <= first:
            self.start += int(self._chunks.popleft().shape[0])
        if self._chunks and first - self.start > 4 * SAMPLE_RATE:  # one long chunk
            self._chunks[0] = self._chunks[0][first - self.start :].copy()
            self.start = first


@dataclass(eq=False, slots=True)
class Turn:
    """Audio that becomes one item of OpenAI's API.

    start, end: where its audio begins and ends; None until the end is known.
    cut_at: where its last utterance was cut. last_speech_end: where the speech in that one ended.
    language: code of its text's language, once some of the text is confirmed.
    error: why a part of it could not be decoded; the turn ends with it.
    is_announced: an event of the turn was sent, so that its end must be sent too.
    is_cleared: its audio was cleared; what is still decoded for it is not sent.
    span: of its trace; it ends with the event that ends the turn.
    """

    number: int
    start: int
    config: LiveConfig
    text: TurnText
    end: int | None = None
    cut_at: int = 0
    last_speech_end: int = 0
    language: str | None = None
    error: SplitscribeError | None = None
    is_announced: bool = False
    is_cleared: bool = False
    span: Span = NO_SPAN

    def configure(self, config: LiveConfig) -> None:
        """Replace the configuration. Only while the turn has no text."""
        self.config = config
        self.text.with_logprobs = config.logprobs


@dataclass(eq=False, slots=True)
class Utterance:
    """A part of a turn that is decoded as one window.

    end: where it ends; None while it grows. ends_turn: whether the turn ends with it.
    speech: the intervals of speech in it as (first, last) sample; the last one may still grow.
    updated_to: where the audio of the last update ended.
    """

    turn: Turn
    start: int
    end: int | None = None
    ends_turn: bool = False
    speech: list[tuple[int, int]] = field(default_factory=list)
    updated_to: int = 0

    def __post_init__(self) -> None:
        self.updated_to = max(self.updated_to, self.start)

    @property
    def speech_end(self) -> int:
        """Where its last speech ends so far; its start if it has no speech."""
        return self.speech[-1][1] if self.speech else self.start

    def add_speech(self, first: int, last: int) -> None:
        """Add speech from sample `first` to `last`, which follows or overlaps the speech so far."""
        if self.speech and first <= self.speech[-1][1]:
            self.speech[-1] = (self.speech[-1][0], max(last, self.speech[-1][1]))
        else:
            self.speech.append((first, last))

    def speech_after(self, at: int) -> list[tuple[int, int]]:
        """The speech after sample `at`."""
        return [(max(first, at), last) for first, last in self.speech if last > at]

    def speech_before(self, at: int) -> list[tuple[int, int]]:
        """The speech before sample `at`."""
        return [(first, min(last, at)) for first, last in self.speech if first < at]


SENTENCE_ENDS = ".?!…。?!।۔"
_QUOTES = "\"'”’»)]}』」"  # may follow the end of a sentence


class TurnText:
    """The confirmed text of a turn.

    emitted: all deltas so far, joined. logprobs: of the tokens of `emitted`, if asked for.
    """

    def __init__(self, tokenizer: WhisperTokenizer, *, logprobs: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.with_logprobs = logprobs
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is not emitted yet
        self._space = ""
        self.emitted = ""
        self.logprobs: list[TokenLogprob] = []

    def add(self, turn: int, tokens: Sequence[int], logprobs: Sequence[float]) -> TextDelta | None:
        """Take the next tokens, which may hold timestamps. None if they give no text to emit.

        Args:
            turn: the turn's number, for the delta.
            logprobs: of each of `tokens`.
        """
        if self.with_logprobs:
            for token, logprob in zip(tokens, logprobs, strict=True):
                if content := self._tokenizer.decode_bytes([token]):
                    shown = content.decode("utf-8", errors="replace")
                    self._waiting.append(TokenLogprob(shown, logprob, tuple(content)))
        return self._delta(turn, self._decoder.decode(self._tokenizer.decode_bytes(tokens)))

    def finish(self, turn: int) -> TextDelta | None:
        """The last delta of the turn, for a character whose bytes never came in full."""
        return self._delta(turn, self._decoder.decode(b"", final=True))

    def _delta(self, turn: int, text: str) -> TextDelta | None:
        fresh = self._space + text
        if not self.emitted:
            fresh = fresh.lstrip()
        shown = fresh.rstrip()
        self._space = fresh[len(shown) :]
        if not shown:
            return None
        self.emitted += shown
        logprobs = tuple(self._waiting)
        self._waiting.clear()
        self.logprobs += logprobs
        return TextDelta(turn, shown, logprobs)


def ends_sentence(text: str) -> bool:
    """Whether a text ends with the end of a sentence."""
    return text.rstrip().rstrip(_QUOTES).endswith(tuple(SENTENCE_ENDS))
