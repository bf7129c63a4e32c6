"""Sequential mode as a state machine: plans windows and turns their tokens into segments.

Follows openai/whisper's long-form algorithm (`transcribe.py`) exactly. Each window begins where the
timestamps or words of the one before ended, and sees its text. A segment of very short, very long
or improbable words amid silence, or amid others like it, is a hallucination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.common.messages import FRAMES_PER_S, WINDOW_FRAMES, DecodeResult, QualityGates
from cluster.common.model.text.quality import is_silence
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import Split, split_tokens
from router.api.params import SequentialOptions
from router.transcript import Segment, Word
from router.transcript_builder import end_of_speech, gather_window, within
from router.words import APPENDED, PREPENDED, add_words

FRAMES_PER_STEP = 2  # mel frames in one timestamp step of 20 ms
HIGHEST_CONTEXT_TEMPERATURE = 0.5  # text sampled above it misleads the windows after it


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    index: int
    seek: int
    n_frames: int
    prompt_tokens: tuple[int, ...]

    @property
    def start_s(self) -> float:
        return self.seek / FRAMES_PER_S

    @property
    def duration_s(self) -> float:
        return self.n_frames / FRAMES_PER_S


class Seeker:
    """Plans a file's windows. If `aligned`, results have word times, which place the windows."""

    def __init__(
        self,
        content_frames: int,
        context: TextContext,
        tokenizer: WhisperTokenizer,
        options: SequentialOptions,
        gates: QualityGates,
        *,
        aligned: bool = False,
    ) -> None:
        self._content_frames = content_frames
        self._context = context
        self._tokenizer = tokenizer
        self._options = options
        self._gates = gates
        self._aligned = aligned
        self._clips = clips_of(options.clip_timestamps, content_frames)
        self._window = PlannedWindow(-1, 0, 0, ())
        self._seek = self._clips[0][0] if self._clips else 0
        self._last_speech_s = 0.0
        self._n_segments = 0

    @property
    def seek(self) -> int:
        """The mel frame up to which the file is done."""
        return min(self._seek, self._content_frames)

    def next_window(self) -> PlannedWindow | None:
        while self._clips:
            start, end = self._clips[0]
            self._seek = max(self._seek, start)
            if self._seek < end:
                self._window = PlannedWindow(
                    index=self._window.index + 1,
                    seek=self._seek,
                    n_frames=min(WINDOW_FRAMES, end - self._seek),
                    prompt_tokens=self._context.prompt_tokens(),
                )
                return self._window
            self._clips.pop(0)
            if self._clips:
                self._seek = self._clips[0][0]  # clips may go back in time
        return None

    def take(self, result: DecodeResult) -> tuple[Segment, ...]:
        """The non-empty segments that the window's tokens close, with their final ids."""
        window = self._window
        self._seek = window.seek + window.n_frames
        if is_silence(self._gates, result.avg_logprob, result.no_speech_prob):
            return ()
        split = split_tokens(result.tokens, self._tokenizer.special.timestamp_begin)
        if split.next_start is not None:
            self._seek = window.seek + split.next_start * FRAMES_PER_STEP
        segments = self._segments(window, result)
        if self._aligned:
            spoken = self._settle_by_words(window, split, segments)
            if spoken is None:
                return ()
            segments = spoken
        kept = [s for s in segments if s.start != s.end and s.text.strip()]
        for segment in kept:
            self._context.add(segment.tokens)
        is_wild = result.temperature > HIGHEST_CONTEXT_TEMPERATURE
        if is_wild or not self._options.condition_on_previous_text:
            self._context.forget()
        self._insist_on_progress(window)
        return tuple(map(self._numbered, kept))

    def _segments(self, window: PlannedWindow, result: DecodeResult) -> Sequence[Segment]:
        transcript = gather_window(
            result,
            self._gates,
            offset_s=window.start_s,
            duration_s=window.duration_s,
            tokenizer=self._tokenizer,
        )
        if transcript.alignment is None:
            return transcript.segments
        return add_words(
            transcript.segments,
            transcript.alignment,
            self._tokenizer,
            language=result.language,
            offset_s=window.start_s,
            last_speech_s=self._last_speech_s,
        )

    # ------------------------------------------------------------------ where words decide

    def _settle_by_words(
        self, window: PlannedWindow, split: Split, segments: Sequence[Segment]
    ) -> Sequence[Segment] | None:
        """Seek by the window's words. None: decode again from a later frame."""
        end_s = end_of_speech(segments)
        goes_on = not split.ends_single and end_s is not None and end_s > window.start_s
        if goes_on and end_s is not None:
            self._seek = round(end_s * FRAMES_PER_S)
        silence_s = self._options.hallucination_silence_threshold
        if silence_s is not None:
            around = Surroundings(
                start_s=window.start_s,
                end_s=window.start_s + window.duration_s,
                limit_s=(window.seek + WINDOW_FRAMES) / FRAMES_PER_S,
                last_speech_s=self._last_speech_s,
                silence_s=silence_s,
            )
            if goes_on and end_s is not None and around.limit_s - end_s <= silence_s:
                self._seek = window.seek + window.n_frames
            gap_s = silence_before_hallucination(segments, around)
            if gap_s is not None:
                self._seek = window.seek + round(gap_s * FRAMES_PER_S)
                self._insist_on_progress(window)
                return None
            segments = self._without_hallucination(segments, around)
        end_s = end_of_speech(segments)
        if end_s is not None:
            self._last_speech_s = end_s
        return segments

    def _without_hallucination(
        self, segments: Sequence[Segment], around: Surroundings
    ) -> Sequence[Segment]:
        """Drop the first hallucination and all behind it, to decode again behind the pause."""
        first = first_hallucination(segments, around)
        if first is None:
            return segments
        segment = segments[first]
        self._seek = round(max(around.start_s + 1, segment.start) * FRAMES_PER_S)
        if self._content_frames / FRAMES_PER_S - segment.end < around.silence_s:
            self._seek = self._content_frames
        return segments[:first]

    def _insist_on_progress(self, window: PlannedWindow) -> None:
        """Never decode from the same frame twice. openai/whisper has no such guard."""
        if self._seek <= window.seek:
            self._seek = window.seek + window.n_frames

    def _numbered(self, segment: Segment) -> Segment:
        self._n_segments += 1
        rounded = within(segment, 0.0, math.inf, self._n_segments - 1)
        last_s = self._content_frames / FRAMES_PER_S
        words = (
            replace(w, start=min(w.start, last_s), end=min(w.end, last_s)) for w in rounded.words
        )
        return replace(rounded, words=tuple(words))


def clips_of(timestamps: Sequence[float], content_frames: int) -> list[tuple[int, int]]:
    """(start, end) of each clip in mel frames, cut at the end of the file."""
    points = [round(seconds * FRAMES_PER_S) for seconds in timestamps] or [0]
    if len(points) % 2:
        points.append(content_frames)
    pairs = zip(points[::2], points[1::2], strict=True)
    return [(start, min(end, content_frames)) for start, end in pairs]


MIN_PROBABILITY = 0.15  # below it a word is improbable
MIN_WORD_S, MAX_WORD_S = 0.133, 2.0
SHORTNESS_WEIGHT = 15  # score per second below MIN_WORD_S
FIRST_WORDS = 8  # of a segment that are scored
ANOMALOUS = 3.0  # least sum of scores of an anomalous segment
EVERY_WORD_SLACK = 0.01  # a segment whose words score 1 each is anomalous, however few they are
EDGE_S = 2.0  # a segment so near to the window's edge counts as beside silence
PUNCTUATION = PREPENDED + APPENDED


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A window's place in its file, in seconds of the upload."""

    start_s: float
    end_s: float  # where its audio ends
    limit_s: float  # 30 s after its start
    last_speech_s: float  # end of the speech in the windows before
    silence_s: float  # least silence around a hallucination


def silence_before_hallucination(segments: Sequence[Segment], around: Surroundings) -> float | None:
    first = _first_spoken(segments)
    if first is None or not is_anomalous(first):
        return None
    gap_s = first.start - around.start_s
    return gap_s if gap_s > around.silence_s else None


def first_hallucination(segments: Sequence[Segment], around: Surroundings) -> int | None:
    speech_end_s = around.last_speech_s
    for index, segment in enumerate(segments):
        if not segment.words:
            continue
        if is_anomalous(segment):
            following = _first_spoken(segments[index + 1 :])
            before = _is_silent_before(segment, speech_end_s, around)
            if before and _is_silent_after(segment, following, around):
                return index
        speech_end_s = segment.end
    return None


def is_anomalous(segment: Segment) -> bool:
    words = [word for word in segment.words if word.word not in PUNCTUATION][:FIRST_WORDS]
    score = sum(map(_anomaly, words))
    return bool(segment.words) and (score >= ANOMALOUS or score + EVERY_WORD_SLACK >= len(words))


def _anomaly(word: Word) -> float:
    length_s = word.end - word.start
    score = 1.0 if word.probability < MIN_PROBABILITY else 0.0
    score += SHORTNESS_WEIGHT * max(0.0, MIN_WORD_S - length_s)
    return score + max(0.0, length_s - MAX_WORD_S)


def _is_silent_before(segment: Segment, speech_end_s: float, around: Surroundings) -> bool:
    return (
        segment.start - speech_end_s > around.silence_s
        or segment.start < around.silence_s
        or segment.start - around.start_s < EDGE_S
    )


def _is_silent_after(segment: Segment, following: Segment | None, around: Surroundings) -> bool:
    next_start_s = around.end_s if following is None else following.words[0].start
    return (
        next_start_s - segment.end > around.silence_s
        or (following is not None and is_anomalous(following))
        or around.limit_s - segment.end < EDGE_S
    )


def _first_spoken(segments: Sequence[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)


# ---- the text before a window


class TextContext:
    """Text so far, whose last tokens a window sees, as in openai/whisper, behind hotwords, as in
    faster-whisper. carried: the initial prompt precedes every window's context.
    """

    def __init__(
        self,
        tokenizer: WhisperTokenizer,
        n_text_ctx: int,
        *,
        prompt: str | None = None,
        hotwords: str | None = None,
        carried: bool = False,
    ) -> None:
        n_room = n_text_ctx // 2 - 1
        self._hotwords = _encode(tokenizer, hotwords)[:n_room]
        self._n_room = n_room - len(self._hotwords)
        self._initial = _encode(tokenizer, prompt)
        self._carried = carried
        self._tokens = list(self._initial)
        self._seen_from = 0  # tokens before are forgotten

    def prompt_tokens(self) -> tuple[int, ...]:
        context = self._tokens[self._seen_from :]
        if self._carried:
            later = self._tokens[max(len(self._initial), self._seen_from) :]
            # As in openai/whisper: later text displaces the start of a prompt that fills the room.
            context = self._initial + later[-(self._n_room - len(self._initial)) :]
        return (*self._hotwords, *(context[-self._n_room :] if self._n_room else ()))

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def forget(self) -> None:
        """Hide all text so far from later windows, except a carried prompt."""
        self._seen_from = len(self._tokens)


def _encode(tokenizer: WhisperTokenizer, text: str | None) -> list[int]:
    stripped = (text or "").strip()
    return tokenizer.encode(f" {stripped}") if stripped else []
