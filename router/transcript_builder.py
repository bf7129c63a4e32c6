"""Turns decoded windows into segments, and these into one transcript.

The rules for splitting and silence are openai/whisper's (`common.model.text`). Times are seconds
from the start of the upload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cluster.common.messages import FRAMES_PER_S, DecodeResult, QualityGates, Task
from cluster.common.model.text.quality import is_silence
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import Piece, split_tokens
from router.transcript import HeardPart, Segment, TokenLogprob, Transcript, WindowTranscript
from router.words import add_words

DIGITS = 3  # decimals of seconds in an answer


def gather_window(
    result: DecodeResult,
    gates: QualityGates,
    *,
    offset_s: float,
    duration_s: float,
    tokenizer: WhisperTokenizer,
    trust_start: bool = False,
) -> WindowTranscript:
    """Split the tokens of a window at `offset_s` of the upload into segments. trust_start: begin
    its only segment at its first timestamp. openai/whisper begins it with the window.
    """
    window = WindowTranscript(offset_s, duration_s, result.language, ())
    if not result.tokens or is_silence(gates, result.avg_logprob, result.no_speech_prob):
        return window
    step_s = tokenizer.timestamp_step_s
    split = split_tokens(result.tokens, tokenizer.special.timestamp_begin)
    pieces, next_start = split.pieces, split.next_start
    if trust_start and not split.is_cut:
        pieces = (_from_first_step(pieces[0], tokenizer),)
    segments: list[Segment] = []
    n_taken = 0
    for piece in pieces:
        logprobs = result.token_logprobs[n_taken : n_taken + len(piece.tokens)]
        n_taken += len(piece.tokens)
        segments.append(
            Segment(
                id=len(segments),
                seek=round(offset_s * FRAMES_PER_S),
                start=offset_s + piece.start * step_s,
                end=offset_s + (duration_s if piece.end is None else piece.end * step_s),
                text=tokenizer.decode(piece.tokens),
                tokens=piece.tokens,
                temperature=result.temperature,
                avg_logprob=result.avg_logprob,
                compression_ratio=result.compression_ratio,
                no_speech_prob=result.no_speech_prob,
                logprobs=logprobs,
            )
        )
    undecoded_s = None if next_start is None else offset_s + next_start * step_s
    return replace(
        window,
        segments=tuple(segments),
        alignment=result.alignment,
        undecoded_s=undecoded_s,
        has_tail=bool(tokenizer.decode(split.tail).strip()),
    )


def _from_first_step(piece: Piece, tokenizer: WhisperTokenizer) -> Piece:
    """Begin a window's only piece at its first timestamp, which then is not its end."""
    if not tokenizer.is_timestamp(piece.tokens[0]):
        return piece
    start = piece.tokens[0] - tokenizer.special.timestamp_begin
    end = piece.end if piece.end is not None and piece.end > start else None
    return replace(piece, start=start, end=end)


class CertainText:
    """Final text of a transcript so far. A trailing space waits for the next segment."""

    def __init__(self) -> None:
        self._closed = ""

    @property
    def whole(self) -> str:
        return self._closed.strip()

    def add(self, segments: Iterable[Segment]) -> str:
        n_told = len(self.whole)
        self._closed += "".join(segment.text for segment in segments)
        return self.whole[n_told:]


class TranscriptBuilder:
    """Joins windows that come in any order."""

    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        self.parts: list[HeardPart] = []  # those with words
        self._tokenizer = tokenizer
        self._windows: dict[int, tuple[WindowTranscript, ...]] = {}  # arrived, not yet in order
        self._next = 0
        self._segments: list[Segment] = []
        self._spoken_s: dict[str, float] = {}  # by language
        self._last_speech_s = 0.0
        self._text = CertainText()

    def add(self, index: int, parts: Sequence[WindowTranscript]) -> tuple[str, tuple[Segment, ...]]:
        """Add the parts of a window. Returns the text and the segments that became final."""
        self._windows[index] = tuple(parts)
        first = len(self._segments)
        while (ready := self._windows.pop(self._next, None)) is not None:
            self._next += 1
            # The last words of a part may overlap the first ones of the next part.
            ends_s = [*(part.offset_s for part in ready[1:]), math.inf]
            for part, end_s in zip(ready, ends_s, strict=True):
                self._settle(part, self._next - 1, end_s)
        closed = tuple(self._segments[first:])
        return self._text.add(closed), closed

    def finish(
        self, *, duration_s: float, task: Task = "transcribe", language: str | None = None
    ) -> Transcript:
        """All windows must have been added. language: None: the one with most speech."""
        assert not self._windows
        spoken = max(self._spoken_s, key=lambda code: self._spoken_s[code], default="en")
        return Transcript(
            task=task,
            language=language or spoken,
            duration_s=duration_s,
            text=self._text.whole,
            segments=tuple(self._segments),
        )

    def _settle(self, part: WindowTranscript, window: int, end_s: float) -> None:
        segments: Sequence[Segment] = part.segments
        if part.alignment is not None:
            segments = add_words(
                segments,
                part.alignment,
                self._tokenizer,
                language=part.language,
                offset_s=part.offset_s,
                last_speech_s=self._last_speech_s,
            )
            heard = HeardPart(window, part, tuple(segments), self._last_speech_s)
            self.parts.append(heard)
        self._spoken_s.setdefault(part.language, 0.0)
        limit_s = part.offset_s + part.duration_s
        for segment in segments:
            kept = within(segment, part.offset_s, limit_s, len(self._segments))
            if kept.start < kept.end and kept.text.strip():
                kept = within(kept, part.offset_s, end_s, kept.id)
                self._segments.append(kept)
                self._spoken_s[part.language] += kept.end - kept.start
        if (speech_end_s := end_of_speech(segments)) is not None:
            self._last_speech_s = speech_end_s


def end_of_speech(segments: Sequence[Segment]) -> float | None:
    """End of the last word, or of the last segment if none has words."""
    ends = [segment.words[-1].end for segment in segments if segment.words]
    return ends[-1] if ends else segments[-1].end if segments else None


def token_logprobs(
    segments: Sequence[Segment], tokenizer: WhisperTokenizer
) -> tuple[TokenLogprob, ...]:
    found = []
    for segment in segments:
        for token, logprob in zip(segment.tokens, segment.logprobs, strict=True):
            if content := tokenizer.decode_bytes([token]):
                text = content.decode("utf-8", errors="replace")
                found.append(TokenLogprob(text, logprob, tuple(content)))
    return tuple(found)


def within(segment: Segment, first_s: float, last_s: float, number: int) -> Segment:
    def inside(seconds: float) -> float:
        return round(min(max(seconds, first_s), last_s), DIGITS)

    words = tuple(
        replace(word, start=inside(word.start), end=inside(word.end)) for word in segment.words
    )
    start, end = inside(segment.start), inside(segment.end)
    return replace(segment, id=number, start=start, end=end, words=words)
