"""What of a known text is said where, told by words that were heard."""

from __future__ import annotations

import pytest

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.known_text import (
    GivenWord,
    aligned_transcript,
    given_words,
    said_parts,
    segments_to_align,
    words_said,
)
from router.transcript import HeardPart, Segment, Transcript, WindowTranscript, Word
from tests.support.checkpoints import cached_checkpoint

MOST = 443


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint())))


def heard(*windows: str) -> list[HeardPart]:
    """A part of a second a word for each window, of a segment for each line."""
    parts = []
    for number, window in enumerate(windows):
        segments, at = [], 100.0 * number
        for line in window.splitlines():
            words = tuple(
                Word(at + i, at + i + 1, f" {w}", 0.5) for i, w in enumerate(line.split())
            )
            text = "".join(word.word for word in words)
            at += len(words)
            segments.append(Segment(0, 0, 0.0, at, text, (), *(0.0,) * 4, words=words))
        part = WindowTranscript(100.0 * number, 30.0, "en", tuple(segments))
        parts.append(HeardPart(number, part, tuple(segments), 0.0))
    return parts


def said(
    tokenizer: WhisperTokenizer, lines: list[str], *windows: str, most: int = MOST
) -> tuple[list[str], list[str]]:
    """Each part's text that is to be aligned, its own words in capitals; and what is alone."""
    given = given_words(lines, tokenizer, "en")
    parts, alone = said_parts(given, heard(*windows), tokenizer, most)
    texts = [
        "|".join(
            "".join(one.text if one.given is None else one.text.upper() for one in some).strip()
            for some in part.said
        )
        for part in parts
    ]
    return texts, [one.text for one in alone]


@pytest.mark.parametrize(
    ("lines", "windows", "expected", "alone"),
    [
        (["one two three"], ["one two three"], ["ONE TWO THREE"], []),
        (["One, two", "three!"], ["one two\nthree"], ["ONE, TWO|THREE!"], []),
        (["one two three four"], ["one two", "three four"], ["ONE TWO", "THREE FOUR"], []),
        (["one two 3 four five"], ["one two three four five"], ["ONE TWO 3 FOUR FIVE"], []),
        (["four five"], ["one two three", "four five"], ["FOUR FIVE"], ["one two three"]),
        (["one two five six"], ["one two um er five six"], ["ONE TWO um er FIVE SIX"], ["um er"]),
        (["one two a b c d e five six"], ["one two five six"], ["ONE TWO FIVE SIX"], []),
        (["one two a b five six"], ["one two five six"], ["ONE TWO A B FIVE SIX"], []),
        (["- one two", "(three)"], ["one two three"], ["- ONE TWO (THREE)"], []),
        (["x y that z w v u t s r q p o n m l k"], ["that was all"], [], ["that was all"]),
        (["anything"], [], [], []),
        (["Straße Ünder ﬁve"], ["strasse UNDER five"], ["STRASSE ÜNDER FIVE"], []),
    ],
)
def test_equal_words_tie_the_text_to_the_audio(
    tokenizer: WhisperTokenizer,
    lines: list[str],
    windows: list[str],
    expected: list[str],
    alone: list[str],
) -> None:
    assert said(tokenizer, lines, *windows) == (expected, alone)


def test_a_window_takes_what_fits(tokenizer: WhisperTokenizer) -> None:
    lines = ["one two three four five"]
    tokens = [len(word.tokens) for word in given_words(lines, tokenizer, "en")]
    texts, _ = said(tokenizer, lines, lines[0], most=sum(tokens[:3]))
    assert texts == ["ONE TWO THREE"]


def test_aligned_words_come_back_to_the_text(tokenizer: WhisperTokenizer) -> None:
    """Though the decoder's words are other groups of the same characters."""
    lines = ["one two", "three", "never heard by anybody in any of these recordings"]
    given = given_words(lines, tokenizer, "en")
    parts, alone = said_parts(given, heard("one um two three"), tokenizer, MOST)
    (part,) = parts
    (segment,) = segments_to_align(part)
    assert tokenizer.decode(segment.tokens) == " one um two three"
    spoken = [(" one", 0.0), (" um", 1.0), (" two three", 2.0)]
    words = tuple(Word(at, at + 0.5, text, 0.25) for text, at in spoken)
    times = words_said(part, [Segment(0, 0, 0, 9, "", (), *(0.0,) * 4, words=words)])
    told = Transcript("transcribe", "en", 9.0, "one um two three", ())
    found = aligned_transcript(told, lines, given, times, alone)
    assert found.alignment is not None
    assert [(w.text, w.time and (w.time.start, w.time.end)) for w in found.alignment.words][:4] == [
        (" one", (0.0, 0.5)),
        (" two", (2.0, 2.5)),
        (" three", (2.0, 2.5)),
        (" never", None),
    ]
    assert [(one.text, one.start, one.end) for one in found.segments] == [
        (" one two", 0.0, 2.5),
        (" three", 2.0, 2.5),
    ]
    assert [one.text for one in found.alignment.heard_alone] == ["um"]
    assert found.text == "\n".join(lines)


def test_a_text_without_spaces_has_words_of_whole_characters(tokenizer: WhisperTokenizer) -> None:
    words = given_words(["今日は、"], tokenizer, "ja")
    assert "".join(word.text for word in words).strip() == "今日は、"
    assert all(isinstance(word, GivenWord) and word.text.strip() for word in words)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["a\n" * 50_000, "?!" * 50_000, "abc" * 40_000])
def test_the_oddest_texts_take_no_time(tokenizer: WhisperTokenizer, text: str) -> None:
    """Many lines, and words without an end: all is done once for each token."""
    lines = text.splitlines()
    given = given_words(lines, tokenizer, "en")
    assert "".join(word.text for word in given).replace(" ", "") == "".join(lines)
    told = Transcript("transcribe", "en", 9.0, "", ())
    found = aligned_transcript(told, lines, given, {}, ())
    assert found.segments == ()
