"""Text that a model makes up over silence, found by its words: openai/whisper's `transcribe.py`.

Words that are very short, very long or improbable make a segment anomalous; an anomalous segment
amid silence, or amid others of its kind, is taken for made up. Pure functions of one window's
segments, which must have their words. Used by `router.seeking`, which decides where to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.transcript import Segment, Word
from router.words import APPENDED, PREPENDED

MIN_PROBABILITY = 0.15  # of a word that counts as spoken
MIN_WORD_S, MAX_WORD_S = 0.133, 2.0
SHORTNESS_WEIGHT = 15  # for a second that a word is too short by
FIRST_WORDS = 8  # of a segment, which are looked at
ANOMALOUS = 3.0  # sum of scores
EVERY_WORD_SLACK = 0.01  # a segment whose words score 1 each is anomalous, however few they are
EDGE_S = 2.0  # a segment so near to the window's edge counts as beside silence
PUNCTUATION = PREPENDED + APPENDED


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a window stands in its file; seconds of the upload.

    limit_s: 30 s after its start; end_s: where its audio ends; last_speech_s: where the speech of
    the windows before it ended; silence_s: how much of it a made-up text has around it.
    """

    start_s: float
    end_s: float
    limit_s: float
    last_speech_s: float
    silence_s: float


def silence_before_hallucination(segments: Sequence[Segment], around: Surroundings) -> float | None:
    """Seconds of silence in front of the window's text, if its beginning seems made up."""
    first = _first_spoken(segments)
    if first is None or not is_anomalous(first):
        return None
    gap_s = first.start - around.start_s
    return gap_s if gap_s > around.silence_s else None


def first_hallucination(segments: Sequence[Segment], around: Surroundings) -> int | None:
    """Index of the first segment that seems made up and has silence on both sides."""
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
    """Whether the segment's first words are unlike words that somebody speaks."""
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
