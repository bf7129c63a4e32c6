"""Compares a known text with a transcript of the same audio: which word is said where.

Equal words tie the two together. Between two ties, a similar number of words on both sides counts
as the same words, heard wrong or written differently (as digits). Other words are only in the text
or only in the audio. The latter are aligned, too, because dynamic time warping spreads all tokens
over all frames.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import WordTokens, joined, split_words
from router.transcript import (
    AlignedWord,
    Alignment,
    HeardAlone,
    HeardPart,
    Segment,
    Transcript,
    Word,
)
from router.word_diff import Step, compared

DIGITS = 3  # decimals of seconds in an answer
# Two runs of words count as the same up to this factor in length,
LIKE = 2
FEW = 3  # and so many words


@dataclass(frozen=True, slots=True)
class GivenWord:
    """A word of the text with its punctuation and the space before it."""

    text: str
    tokens: tuple[int, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Said:
    tokens: tuple[int, ...]
    text: str
    given: int | None  # number of the text's word; None: it was only heard


@dataclass(frozen=True, slots=True)
class SaidPart:
    heard: HeardPart
    said: tuple[tuple[Said, ...], ...]  # by segment of the part

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for some in self.said for one in some for token in one.tokens)


def given_words(
    lines: Sequence[str], tokenizer: WhisperTokenizer, language: str
) -> list[GivenWord]:
    """Split lines into words. A mark joins the word before it, or else the one behind it."""
    words: list[GivenWord] = []
    for number, line in enumerate(lines):
        tokens = tokenizer.encode(f" {line.strip()}") if line.strip() else []
        own: list[list[WordTokens]] = []
        is_heard = True  # whether the last word has a letter yet
        for word in split_words(tokens, tokenizer, language):
            has_sound = bool(_sound(word.text))
            if own and not (has_sound and is_heard):
                own[-1].append(word)
                is_heard = is_heard or has_sound
            else:
                own.append([word])
                is_heard = has_sound
        for some in own:
            whole = joined(some)
            words.append(GivenWord(whole.text, whole.tokens, number))
    return words


def said_parts(
    given: Sequence[GivenWord],
    parts: Sequence[HeardPart],
    tokenizer: WhisperTokenizer,
    most_tokens: int,
) -> tuple[list[SaidPart], tuple[HeardAlone, ...]]:
    """Find the parts that have words of the text, and the words that only the audio has.

    Words beyond `most_tokens` of a part are left out. Raises InvalidRequestError if the text and
    the transcript differ too much in length.
    """
    heard = _heard_words(parts)
    places = _places(given, [word for _, _, word in heard])
    said: dict[tuple[int, int], list[Said]] = {}
    for number, at in places.said:
        part_number, segment_number, word = heard[at]
        if number is None:
            one = Said(tuple(tokenizer.encode(word.word)), word.word, None)
        else:
            one = Said(given[number].tokens, given[number].text, number)
        said.setdefault((part_number, segment_number), []).append(one)
    found = []
    for i, part in enumerate(parts):
        room, segments = most_tokens, []
        for j, segment in enumerate(part.segments):
            here = said.get((i, j), []) if segment.text.strip() else [_left_out(segment, tokenizer)]
            kept = []
            for one in here:
                room -= len(one.tokens)
                if room >= 0:
                    kept.append(one)
            segments.append(tuple(kept))
        if any(one.given is not None for some in segments for one in some):
            found.append(SaidPart(part, tuple(segments)))
    return found, _heard_alone(parts, places.alone)


def segments_to_align(part: SaidPart) -> list[Segment]:
    raw = part.heard.part.segments
    return [
        replace(segment, tokens=tuple(token for one in said for token in one.tokens), words=())
        for segment, said in zip(raw, part.said, strict=True)
    ]


def words_said(part: SaidPart, aligned: Sequence[Segment]) -> dict[int, Word]:
    """Times of the text's words in a part, by number. `aligned`: its segments with words."""
    found = {}
    for said, segment in zip(part.said, aligned, strict=True):
        words = iter(segment.words)
        word, word_end, end = None, 0, 0
        for one in said:
            begin, end = end, end + len(one.text)
            own: list[Word] = [word] if word is not None and word_end > begin else []
            while word_end < end and (word := next(words, None)) is not None:
                word_end += len(word.word)
                own.append(word)
            if one.given is not None and own:
                probability = fmean(each.probability for each in own)
                start, end_s = (round(at_s, DIGITS) for at_s in (own[0].start, own[-1].end))
                found[one.given] = Word(start, end_s, one.text, probability)
    return found


def aligned_transcript(
    heard: Transcript,
    lines: Sequence[str],
    given: Sequence[GivenWord],
    times: Mapping[int, Word],
    alone: Sequence[HeardAlone],
) -> Transcript:
    """`heard` with the known text, and with one segment for each line that has times."""
    words = [AlignedWord(word.text, word.line, times.get(i)) for i, word in enumerate(given)]
    timed: list[list[Word]] = [[] for _ in lines]
    for word in words:
        if word.time is not None:
            timed[word.line].append(word.time)
    segments: list[Segment] = []
    for line, own in zip(lines, timed, strict=True):
        if own:
            start, end = own[0].start, max(word.end for word in own)
            text, number = f" {line.strip()}", len(segments)
            said = tuple(own)
            segments.append(Segment(number, 0, start, end, text, (), *(0.0,) * 4, words=said))
    return replace(
        heard,
        text="\n".join(lines),
        segments=tuple(segments),
        alignment=Alignment(tuple(lines), tuple(words), tuple(alone)),
    )


def _heard_words(parts: Sequence[HeardPart]) -> list[tuple[int, int, Word]]:
    return [
        (i, j, word)
        for i, part in enumerate(parts)
        for j, segment in enumerate(part.segments)
        if segment.text.strip()
        for word in segment.words
    ]


def _left_out(segment: Segment, tokenizer: WhisperTokenizer) -> Said:
    """Doubted text that the transcript leaves out, but that was aligned with the rest."""
    tokens = tuple(token for token in segment.tokens if token < tokenizer.special.eot)
    return Said(tokens, tokenizer.decode(tokens), None)


@dataclass(frozen=True, slots=True)
class _Places:
    said: list[tuple[int | None, int]]  # in order: numbers of the text's word and of the heard one
    alone: list[int]  # heard words that the text does not have


def _places(given: Sequence[GivenWord], heard: Sequence[Word]) -> _Places:
    places = _Places([], [])
    if not heard:
        return places
    steps = compared([_sound(one.text) for one in given], [_sound(one.word) for one in heard])
    equal = [False, *(step.is_equal for step in steps), False]
    stretch: list[Step] = []  # since the last tie
    last = 0
    for i, step in enumerate(steps):
        if step.right is not None and step.is_equal and (equal[i] or equal[i + 2]):
            _place(stretch, last, places)  # a single equal word may be chance
            stretch.clear()
            last = step.right
            places.said.append((step.left, last))
        else:
            stretch.append(step)
    _place(stretch, last, places)
    return places


def _place(stretch: Sequence[Step], last: int, places: _Places) -> None:
    """Place the words between two ties. `last`: the heard word of the first tie."""
    n_given = sum(step.left is not None for step in stretch)
    n_heard = sum(step.right is not None for step in stretch)
    is_said = n_given <= LIKE * n_heard + FEW and n_heard <= LIKE * n_given + FEW
    text: list[tuple[int | None, int]] = []
    alone: list[int] = []

    def take() -> None:
        places.said.extend(text or ((None, at) for at in alone))
        places.alone.extend(alone if not text else ())
        text.clear()
        alone.clear()

    for left, right, is_equal in stretch:
        last = last if right is None else right
        if is_equal and is_said:
            take()
            places.said.append((left, last))
            continue
        if left is not None and is_said:
            text.append((left, last))
        if right is not None:
            alone.append(right)
    take()


def _heard_alone(parts: Sequence[HeardPart], alone: Sequence[int]) -> tuple[HeardAlone, ...]:
    words = [word for _, _, word in _heard_words(parts)]
    runs: list[list[int]] = []
    for at in alone:
        if runs and runs[-1][-1] == at - 1:
            runs[-1].append(at)
        else:
            runs.append([at])
    return tuple(
        HeardAlone(
            words[run[0]].start, words[run[-1]].end, "".join(words[at].word for at in run).strip()
        )
        for run in runs
    )


def _sound(word: str) -> str:
    """The letters and digits of a word, by which words are compared."""
    folded = unicodedata.normalize("NFKC", word).casefold()
    return "".join(letter for letter in folded if letter.isalnum())
