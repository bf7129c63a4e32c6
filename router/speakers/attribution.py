"""Assigns speakers to the words and segments of a transcript.

A word gets the speaker whose turns overlap it most, or else the nearest within 1 s; on a tie the
speaker of the word before. A sentence has one speaker, unless another one has at least two words
and half a second of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter

from router.transcript import Segment, Word
from router.words import ends_sentence

NEAREST_S = 1.0  # largest distance from a word to its turn
PAUSE_S = 1.0  # between two words, which ends a sentence
LEAST_WORDS, LEAST_S = 2, 0.5  # of a second speaker in a sentence
DIGITS = 6  # decimals of compared seconds


@dataclass(frozen=True, slots=True)
class SpeakerTurn:
    """One speaker's speech, in seconds of the file. Turns are sorted and do not overlap."""

    start: float
    end: float
    speaker: str


class Attribution:
    """Assigns a file's turns to its segments as they come. Sentences end with segments."""

    def __init__(self, turns: Sequence[SpeakerTurn]) -> None:
        self._turns = turns
        self._ends = [turn.end for turn in turns]
        self._before: str | None = None  # speaker of the previous word
        self._n_segments = 0

    def add(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Split the next segments where the speaker changes, and number them. Without a turn nearby
        the speaker is None. A split segment's first piece has its tokens.
        """
        spans: list[Segment | Word] = []
        for segment in segments:
            spans.extend(segment.words or (segment,))
        speakers = [self._speaker_of(span.start, span.end) for span in spans]
        for first, end in _sentences(spans):
            speakers[first:end] = _smoothed(spans[first:end], speakers[first:end])
        found: list[Segment] = []
        left = iter(speakers)
        for segment in segments:
            if not segment.words:
                found.append(replace(segment, speaker=next(left)))
                continue
            words = [replace(word, speaker=next(left)) for word in segment.words]
            found += _cut(segment, words)
        first_id = self._n_segments
        self._n_segments += len(found)
        return tuple(replace(one, id=number) for number, one in enumerate(found, first_id))

    def _speaker_of(self, start: float, end: float) -> str | None:
        first = bisect_left(self._ends, start - NEAREST_S)
        last = bisect_right(self._turns, end + NEAREST_S, first, key=attrgetter("start"))
        overlaps: dict[str, float] = {}
        nearness: dict[str, float] = {}  # seconds to the nearest turn, negative
        for turn in self._turns[first:last]:
            shared_s = round(min(end, turn.end) - max(start, turn.start), DIGITS)
            if shared_s > 0:
                overlaps[turn.speaker] = overlaps.get(turn.speaker, 0.0) + shared_s
            nearest_s = nearness.get(turn.speaker, -NEAREST_S)
            nearness[turn.speaker] = max(nearest_s, min(0.0, shared_s))
        shares = overlaps or nearness
        best = max(shares.values(), default=0.0)
        found = [who for who, share in shares.items() if share == best]
        if self._before not in found:
            self._before = found[0] if found else None
        return self._before


def _sentences(spans: Sequence[Segment | Word]) -> Iterator[tuple[int, int]]:
    """(first, end) of each sentence. A segment without words is a sentence."""
    first = 0
    for i, (span, following) in enumerate(pairwise(spans), start=1):
        text = span.word if isinstance(span, Word) else ""
        has_pause = following.start - span.end > PAUSE_S
        if ends_sentence(text) or has_pause or not text or isinstance(following, Segment):
            yield first, i
            first = i
    if spans:
        yield first, len(spans)


def _smoothed(spans: Sequence[Segment | Word], speakers: Sequence[str | None]) -> list[str | None]:
    """Replace speakers with too little of a sentence by its main speaker."""
    seconds: dict[str | None, float] = {}
    for span, speaker in zip(spans, speakers, strict=True):
        seconds[speaker] = seconds.get(speaker, 0.0) + span.end - span.start
    main = max(seconds, key=lambda who: (who is not None, seconds[who]))
    kept: list[str | None] = []
    for speaker, run in groupby(zip(spans, speakers, strict=True), key=lambda pair: pair[1]):
        said = [span for span, _ in run]
        is_short = len(said) < LEAST_WORDS or said[-1].end - said[0].start < LEAST_S
        kept += [main if is_short or speaker is None else speaker] * len(said)
    return kept


def _cut(segment: Segment, words: Sequence[Word]) -> list[Segment]:
    runs = [tuple(run) for _, run in groupby(words, key=lambda word: word.speaker)]
    if len(runs) == 1:
        return [replace(segment, words=runs[0], speaker=runs[0][0].speaker)]
    pieces = []
    for i, run in enumerate(runs):
        piece = replace(
            segment,
            start=run[0].start if i else segment.start,
            end=run[-1].end if i < len(runs) - 1 else segment.end,
            text="".join(word.word for word in run),
            words=run,
            speaker=run[0].speaker,
        )
        pieces.append(replace(piece, tokens=(), logprobs=()) if i else piece)
    return pieces


class SpokenText:
    """Text with a line for each turn, which begins with the speaker's name."""

    def __init__(self) -> None:
        self.whole = ""
        self._speaker: str | None = None

    def add(self, segments: Iterable[Segment]) -> str:
        first = len(self.whole)
        for segment in segments:
            if not (text := segment.text.strip()):
                continue
            if self.whole and segment.speaker == self._speaker:
                self.whole += segment.text.rstrip()
            else:
                line = "\n" if self.whole else ""
                name = "" if segment.speaker is None else f"{segment.speaker}: "
                self.whole += f"{line}{name}{text}"
            self._speaker = segment.speaker
        return self.whole[first:]
