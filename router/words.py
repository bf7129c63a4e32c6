"""Word times from the tokens' alignment, by openai/whisper's rules (`timing.py`).

Alignment knows no pauses, so words at the edges of sentences and segments come out too long. They
are shortened by the window's median word length. Then words and segments get common edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from cluster.common.messages import TokenAlignment
from cluster.common.model.text.words import split_words
from router.transcript import Segment, Word

if TYPE_CHECKING:
    from cluster.common.model.text.tokenizer import WhisperTokenizer

MEDIAN_LIMIT_S = 0.7  # upper limit of the median word length
EDGE_S = 0.5  # that a word may reach beyond its segment's edge
DIGITS = 2  # decimals of seconds: alignment has steps of 20 ms
SENTENCE_ENDS = ".。!！?？"
ENDS = (*SENTENCE_ENDS, *"…।۔؟")  # in all scripts
PREPENDED = "\"'“¿([{-"  # belongs to the word behind it
APPENDED = "\"'.。,，!！?？:：”)]}、"  # belongs to the word before it
CLOSING = "\"'”’)]}»』」 "  # may follow the end of a sentence


@dataclass(slots=True)
class _Timing:
    """A word in progress. `text` and `n_tokens` are empty once it is joined to another."""

    text: str
    n_tokens: int
    start: float
    end: float
    probability: float

    @property
    def length(self) -> float:
        return self.end - self.start


def ends_sentence(text: str) -> bool:
    return text.rstrip(CLOSING).endswith(ENDS)


def add_words(
    segments: Sequence[Segment],
    alignment: TokenAlignment,
    tokenizer: WhisperTokenizer,
    *,
    language: str,
    offset_s: float,
    last_speech_s: float,
) -> list[Segment]:
    """The segments with their words, which set the segments' bounds. In seconds of the upload the
    window begins at `offset_s`, and the speech before it ends at `last_speech_s`.
    """
    timings = _timings(alignment, tokenizer, language)
    median_s = _median_s(timings)
    _shorten_at_sentence_ends(timings, median_s)
    _join_prepended(timings)
    _join_appended(timings)
    settled: list[Segment] = []
    first = 0
    for segment in segments:
        n_text = sum(token < tokenizer.special.eot for token in segment.tokens)
        end = _end_of(timings, first, n_text)
        words = [_placed(timing, offset_s) for timing in timings[first:end] if timing.text]
        first = end
        if words:
            _shorten_after_pause(words, median_s, last_speech_s)
            segment = _settle(segment, words, median_s)
            last_speech_s = segment.end
        found = tuple(Word(w.start, w.end, w.text, w.probability) for w in words)
        settled.append(replace(segment, words=found))
    return settled


def _timings(
    alignment: TokenAlignment, tokenizer: WhisperTokenizer, language: str
) -> list[_Timing]:
    timings = []
    first = 0
    for word in split_words(alignment.tokens, tokenizer, language):
        end = first + len(word.tokens)
        probability = fmean(alignment.probs[first:end])
        start_s, end_s = alignment.times_s[first], alignment.times_s[end]
        timings.append(_Timing(word.text, len(word.tokens), start_s, end_s, probability))
        first = end
    return timings


def _median_s(timings: Sequence[_Timing]) -> float:
    lengths = [timing.length for timing in timings if timing.length]
    return min(MEDIAN_LIMIT_S, median(lengths)) if lengths else 0.0


def _shorten_at_sentence_ends(timings: Sequence[_Timing], median_s: float) -> None:
    longest_s = 2 * median_s
    if not longest_s:
        return
    for before, timing in pairwise(timings):
        if timing.length <= longest_s:
            continue
        if timing.text in SENTENCE_ENDS:
            timing.end = timing.start + longest_s
        elif before.text in SENTENCE_ENDS:
            timing.start = timing.end - longest_s


def _join_prepended(timings: Sequence[_Timing]) -> None:
    behind = len(timings) - 1
    for i in range(len(timings) - 2, -1, -1):
        mark = timings[i]
        if mark.text.startswith(" ") and mark.text.strip() in PREPENDED:
            timings[behind].text = mark.text + timings[behind].text
            timings[behind].n_tokens += mark.n_tokens
            mark.text, mark.n_tokens = "", 0
        else:
            behind = i


def _join_appended(timings: Sequence[_Timing]) -> None:
    before = 0
    for i in range(1, len(timings)):
        mark = timings[i]
        if not timings[before].text.endswith(" ") and mark.text in APPENDED:
            timings[before].text += mark.text
            timings[before].n_tokens += mark.n_tokens
            mark.text, mark.n_tokens = "", 0
        else:
            before = i


def _end_of(timings: Sequence[_Timing], first: int, n_tokens: int) -> int:
    """Index behind the words from `first` on that hold `n_tokens` tokens."""
    end = first
    while end < len(timings) and n_tokens > 0:
        n_tokens -= timings[end].n_tokens
        end += 1
    return end


def _placed(timing: _Timing, offset_s: float) -> _Timing:
    start, end = round(offset_s + timing.start, DIGITS), round(offset_s + timing.end, DIGITS)
    return replace(timing, start=start, end=end)


def _shorten_after_pause(words: Sequence[_Timing], median_s: float, last_speech_s: float) -> None:
    first, second = words[0], words[1] if len(words) > 1 else None
    if first.end - last_speech_s <= 4 * median_s:
        return
    longest_s = 2 * median_s
    if first.length <= longest_s and (second is None or second.end - first.start <= 2 * longest_s):
        return
    if second is not None and second.length > longest_s:
        first.end = second.start = max(second.end / 2, second.end - longest_s)
    first.start = max(0.0, first.end - longest_s)


def _settle(segment: Segment, words: Sequence[_Timing], median_s: float) -> Segment:
    """Give the segment its words' edges, or the words its own if theirs are far outside."""
    first, last = words[0], words[-1]
    start, end = segment.start, segment.end
    if first.start < start - EDGE_S and start < first.end:
        first.start = max(0.0, min(first.end - median_s, start))
    else:
        start = first.start
    if end + EDGE_S < last.end and last.start < end:
        last.end = max(last.start + median_s, end)
    else:
        end = last.end
    return replace(segment, start=start, end=end)
