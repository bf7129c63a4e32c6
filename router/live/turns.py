"""Holds one session's audio, its turns and utterances, and the events about them.

A delta holds whole characters only. The text of a turn has no space at its beginning or end: a
space at the end of a delta is sent with the next one.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.metrics import Recorder
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.tracing import Span, Tracer
from router.live.interface import LiveConfig, LiveEvent, TextDelta, TurnCompleted, TurnFailed
from router.transcript import TokenLogprob

QUIET_SAMPLES = SAMPLE_RATE * 3 // 50  # 60 ms, the length over which energy is measured


def seconds(n_samples: int) -> float:
    return n_samples / SAMPLE_RATE


def milliseconds(n_samples: int) -> int:
    return n_samples * 1000 // SAMPLE_RATE


def quietest(audio: Pcm, first: int, last: int) -> tuple[int, float]:
    """Return the middle of the quietest 60 ms, and its energy: infinite if there is none."""
    last = min(last, int(audio.shape[0]) - QUIET_SAMPLES)
    if last <= first:
        return max(0, min(first, int(audio.shape[0]))), float("inf")
    span = audio[first : last + QUIET_SAMPLES].astype(np.float64)
    power = np.concatenate(([0.0], np.cumsum(np.square(span))))
    level = power[QUIET_SAMPLES:] - power[:-QUIET_SAMPLES]
    latest = int(level.shape[0]) - 1 - int(np.argmin(level[::-1]))
    return first + latest + QUIET_SAMPLES // 2, float(level[latest])


class AudioBuffer:
    """The audio from sample `start` to `end`, which may still be decoded."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._chunks: deque[Pcm] = deque()

    def append(self, pcm: Pcm) -> None:
        self._chunks.append(pcm)
        self.end += int(pcm.shape[0])

    def span(self, first: int, last: int) -> Pcm:
        """Return a copy of the samples, int16. All of them must still be in the buffer."""
        assert self.start <= first <= last <= self.end, (self.start, first, last, self.end)
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks.clear()
            self._chunks.append(joined)
        chunk = self._chunks[0] if self._chunks else np.empty(0, np.int16)
        return chunk[first - self.start : last - self.start].copy()

    def held(self, first: int, last: int) -> Pcm:
        """As `span`, but limited to the samples that are in the buffer."""
        last = max(self.start, min(last, self.end))
        return self.span(min(max(first, self.start), last), last)

    def drop_before(self, first: int) -> None:
        while self._chunks and self.start + self._chunks[0].shape[0] <= first:
            self.start += int(self._chunks.popleft().shape[0])
        if self._chunks and first - self.start > 4 * SAMPLE_RATE:  # a long chunk is cut
            self._chunks[0] = self._chunks[0][first - self.start :].copy()
            self.start = first


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float
    peak: int | None  # attention peak, a position; None: a timestamp, or not requested


@dataclass(eq=False, slots=True)
class Turn:
    number: int
    start: int
    config: LiveConfig
    span: Span  # ends with the turn's last event
    text: str = ""  # its deltas so far, joined
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: int | None = None  # None: not known yet
    cut_at: int = 0  # end of the last utterance, perhaps of the turn before
    last_speech_end: int = 0  # of that utterance
    language: str | None = None  # None: no text is confirmed yet
    error: SplitscribeError | None = None  # of one of its utterances; it fails the turn
    is_announced: bool = False  # an event was sent, so that its end must be sent, too
    is_cleared: bool = False  # text that is still being decoded is not sent
    _characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _space: str = ""  # white space held back from the last delta
    _waiting: list[TokenLogprob] = field(default_factory=list)  # of text that is not sent yet

    def take(
        self, tokenizer: WhisperTokenizer, tokens: Sequence[Token], *, last: bool = False
    ) -> TextDelta | None:
        """Return the text to send after these tokens. last: include incomplete characters."""
        for token in tokens if self.config.logprobs else ():
            if content := tokenizer.decode_bytes([token.id]):
                shown = content.decode("utf-8", errors="replace")
                self._waiting.append(TokenLogprob(shown, token.logprob, tuple(content)))
        content = tokenizer.decode_bytes([token.id for token in tokens])
        fresh = self._space + self._characters.decode(content, last)
        if not self.text:
            fresh = fresh.lstrip()
        shown = fresh.rstrip()
        self._space = fresh[len(shown) :]
        if not shown:
            return None
        self.text += shown
        logprobs, self._waiting = tuple(self._waiting), []
        self.logprobs += logprobs
        return TextDelta(self.number, shown, logprobs)


@dataclass(eq=False, slots=True)
class Utterance:
    turn: Turn
    start: int
    end: int | None = None  # None: it still grows
    ends_turn: bool = False
    speech: list[tuple[int, int]] = field(default_factory=list)  # samples; the last may grow
    updated_to: int = 0  # end of the last update's audio

    def __post_init__(self) -> None:
        self.updated_to = max(self.updated_to, self.start)

    @property
    def speech_end(self) -> int:
        return self.speech[-1][1] if self.speech else self.start

    def add_speech(self, first: int, last: int) -> None:
        """The new speech must follow or overlap the last one."""
        if self.speech and first <= self.speech[-1][1]:
            self.speech[-1] = (self.speech[-1][0], max(last, self.speech[-1][1]))
        else:
            self.speech.append((first, last))

    def speech_after(self, at: int) -> list[tuple[int, int]]:
        return [(max(first, at), last) for first, last in self.speech if last > at]

    def speech_before(self, at: int) -> list[tuple[int, int]]:
        return [(first, min(last, at)) for first, last in self.speech if first < at]


class SessionEvents:
    """Queues one session's events in order, and keeps the text of its turns."""

    def __init__(
        self, tokenizer: WhisperTokenizer, recorder: Recorder, tracer: Tracer, session_id: str
    ) -> None:
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._tracer = tracer
        self._session_id = session_id
        self._queue: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        self.is_over = False

    async def events(self) -> AsyncIterator[LiveEvent]:
        while (event := await self._queue.get()) is not None:
            yield event

    def take(self) -> list[LiveEvent]:
        taken = []
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)  # this is the end marker for `events`
                break
            taken.append(event)
        return taken

    def emit(self, event: LiveEvent) -> None:
        if not self.is_over:
            self._queue.put_nowait(event)

    def new_turn(self, number: int, start: int, config: LiveConfig) -> Turn:
        span = self._tracer.root("live turn", "", request_id=self._session_id, turn=number)
        return Turn(number, start, config, span, last_speech_end=start)

    def emit_text(
        self, utterance: Utterance, language: str, tokens: Sequence[Token], newest: int
    ) -> None:
        """newest: the last sample that was received, to measure the delay of words."""
        turn = utterance.turn
        if turn.is_cleared or not tokens:
            return
        turn.language = turn.language or language
        if (delta := turn.take(self._tokenizer, tokens)) is None:
            return
        turn.is_announced = True
        self.emit(delta)
        for token in tokens:
            if token.peak is not None:
                delay_s = seconds(newest - utterance.start - token.peak * SAMPLES_PER_POSITION)
                self._recorder.observe("splitscribe_live_word_delay_seconds", delay_s)

    def end_turn(self, turn: Turn, end: int) -> None:
        turn.is_announced = True
        audio_s = seconds(max(0, end - turn.start))
        outcome = "completed" if turn.error is None else "failed"
        self._recorder.add("splitscribe_live_turns_total", outcome=outcome)
        self._recorder.add("splitscribe_live_audio_seconds_total", audio_s)
        turn.span.note(audio_s=audio_s)
        turn.span.end(turn.error)
        if turn.error is not None:
            self.emit(TurnFailed(turn.number, turn.error))
            return
        if (delta := turn.take(self._tokenizer, (), last=True)) is not None:
            self.emit(delta)
        language = turn.language or turn.config.language
        self.emit(TurnCompleted(turn.number, turn.text, audio_s, language, tuple(turn.logprobs)))

    def fail_turns(self, turns: Iterable[Turn], error: SplitscribeError, end: int) -> None:
        """End the announced turns among `turns` with an error."""
        for turn in sorted(set(turns), key=lambda turn: turn.number):
            if turn.is_announced and not turn.is_cleared:
                turn.error = error
                self.end_turn(turn, end)

    def close(self) -> None:
        self._queue.put_nowait(None)
        self.is_over = True
