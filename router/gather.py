"""Decoded windows become segments with true offsets, and segments become one transcript.

Pure functions: tokens, offsets and scores in, frozen values out. Knows nothing of workers,
HTTP or output formats. The splitting rule and the silence rule are openai/whisper's
(`transcribe.py`); two things differ because windows are decoded side by side here instead of
one after the other: times are clamped to the window's audio, and a tail behind the last
closed pair of timestamps is kept (there is no next window that would decode it again).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.messages import DecodeResult, Task

FRAMES_PER_S = 100  # mel frames, the unit of `seek`
NO_SPEECH_THRESHOLD = 0.6
LOGPROB_THRESHOLD = -1.0


class TextTokenizer(Protocol):
    """What is needed of the checkpoint's tokenizer (`cluster.model.tokenizer`)."""

    def is_timestamp(self, token: int) -> bool: ...

    def timestamp_s(self, token: int) -> float:
        """Seconds from the window's start."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, leading space kept, timestamps and special tokens left out."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech. Times are seconds from the start of the upload.

    seek: mel frame at which the window began; text keeps its leading space; tokens include
    the timestamps around it; the four scores belong to the whole window.
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


@dataclass(frozen=True, slots=True)
class WindowTranscript:
    """One window's segments (none for silence), and what its decoder took the language for."""

    offset_s: float
    duration_s: float
    language: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole upload as text. `language` is a code such as "en"; `duration_s` is the audio's."""

    task: Task
    language: str
    duration_s: float
    text: str
    segments: tuple[Segment, ...]


def gather_window(
    result: DecodeResult, *, offset_s: float, duration_s: float, tokenizer: TextTokenizer
) -> WindowTranscript:
    """Split one window's tokens into segments.

    Args:
        result: what the decoder answered.
        offset_s: where the window's audio begins in the upload.
        duration_s: seconds of audio in the window, without padding.
        tokenizer: of the checkpoint that decoded it.
    """
    segments: list[Segment] = []
    if not is_silence(result):
        ratio = compression_ratio(tokenizer.decode(result.tokens).strip())
        for start_s, end_s, tokens in _split(result.tokens, duration_s, tokenizer):
            text = tokenizer.decode(tokens)
            start_s, end_s = max(0.0, start_s), min(end_s, duration_s)
            if start_s >= end_s or not text.strip():
                continue
            segments.append(
                Segment(
                    id=len(segments),
                    seek=int(offset_s * FRAMES_PER_S),
                    start=round(offset_s + start_s, 3),
                    end=round(offset_s + end_s, 3),
                    text=text,
                    tokens=tuple(tokens),
                    temperature=result.temperature,
                    avg_logprob=result.avg_logprob,
                    compression_ratio=ratio,
                    no_speech_prob=result.no_speech_prob,
                )
            )
    return WindowTranscript(offset_s, duration_s, result.language, tuple(segments))


def merge_windows(
    windows: Iterable[WindowTranscript],
    *,
    duration_s: float,
    task: Task = "transcribe",
    language: str | None = None,
) -> Transcript:
    """Put windows, in any order, together to one transcript.

    Args:
        windows: all windows of the upload.
        duration_s: length of the upload's audio.
        task: what was asked for.
        language: code that the client named; None: the one with most seconds of speech.
    """
    in_order = sorted(windows, key=lambda window: window.offset_s)
    segments = tuple(
        replace(segment, id=index)
        for index, segment in enumerate(
            segment for window in in_order for segment in window.segments
        )
    )
    return Transcript(
        task=task,
        language=language or _spoken_language(in_order),
        duration_s=duration_s,
        text="".join(segment.text for segment in segments).strip(),
        segments=segments,
    )


def is_silence(result: DecodeResult) -> bool:
    """Whether the window holds no speech: the model says so and is unsure of its text."""
    return result.no_speech_prob > NO_SPEECH_THRESHOLD and result.avg_logprob <= LOGPROB_THRESHOLD


def compression_ratio(text: str) -> float:
    """UTF-8 bytes over zlib bytes: high for text that repeats itself."""
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))


def _split(
    tokens: Sequence[int], duration_s: float, tokenizer: TextTokenizer
) -> list[tuple[float, float, Sequence[int]]]:
    """Cut at pairs of timestamps: (start_s, end_s, tokens) each, relative to the window.

    `<0.00> a <1.20><1.40> b <2.00>` gives (0.00, 1.20, a) and (1.40, 2.00, b). Without a pair
    the window is one segment, from its start to its last nonzero timestamp or its end.
    """
    is_time = [tokenizer.is_timestamp(token) for token in tokens]
    cuts = [index for index in range(1, len(tokens)) if is_time[index - 1] and is_time[index]]
    if not cuts:
        times_s = [
            tokenizer.timestamp_s(token) for token in tokens if tokenizer.is_timestamp(token)
        ]
        end_s = times_s[-1] if times_s and times_s[-1] > 0.0 else duration_s
        return [(0.0, end_s, tokens)]
    pieces: list[tuple[float, float, Sequence[int]]] = []
    first = 0
    for cut in [*cuts, len(tokens)]:
        start_s = tokenizer.timestamp_s(tokens[first]) if is_time[first] else 0.0
        is_closed = cut - first > 1 and is_time[cut - 1]
        end_s = tokenizer.timestamp_s(tokens[cut - 1]) if is_closed else duration_s
        pieces.append((start_s, end_s, tokens[first:cut]))
        first = cut
    return pieces


def _spoken_language(windows: Sequence[WindowTranscript]) -> str:
    """The language with most seconds of speech; the earlier one of two that are even."""
    seconds: dict[str, float] = {}
    for window in windows:
        spoken_s = sum(segment.end - segment.start for segment in window.segments)
        seconds[window.language] = seconds.get(window.language, 0.0) + spoken_s
    return max(seconds, key=lambda code: seconds[code], default="en")
