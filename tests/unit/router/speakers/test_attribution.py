"""Words and segments get the speakers of a file's turns."""

from __future__ import annotations

import pytest

from router.speakers.attribution import Attribution, SpeakerTurn
from router.transcript import Segment, Word


def turns(*spans: tuple[float, float, str]) -> list[SpeakerTurn]:
    return [SpeakerTurn(*span) for span in spans]


def attribute(segments: list[Segment], said: list[SpeakerTurn]) -> tuple[Segment, ...]:
    return Attribution(said).add(segments)


def segment(text: str, start: float, step: float = 0.4, *, words: bool = True) -> Segment:
    said = text.split()
    found = tuple(
        Word(start + i * step, start + (i + 1) * step, f" {word}", 0.5)
        for i, word in enumerate(said)
    )
    end = start + len(said) * step
    tokens = tuple(range(len(said)))
    scores = (0.0, -0.1, 1.0, 0.0)
    logprobs = (-0.5,) * len(tokens)
    return Segment(
        7, 0, start, end, f" {text}", tokens, *scores, logprobs, words=found if words else ()
    )


def spoken(segments: tuple[Segment, ...]) -> list[tuple[str | None, str]]:
    return [(one.speaker, one.text) for one in segments]


def test_a_segment_is_cut_where_the_speaker_changes() -> None:
    first = segment("How are you? Very well, thank you.", 1.0)
    found = attribute([first], turns((0.0, 2.2, "A"), (2.3, 9.0, "B")))
    assert spoken(found) == [("A", " How are you?"), ("B", " Very well, thank you.")]
    assert [one.id for one in found] == [0, 1]
    assert found[0].start == first.start
    assert found[0].end == found[1].start == pytest.approx(2.2)
    assert found[1].end == first.end
    assert all(word.speaker == one.speaker for one in found for word in one.words)
    assert tuple(word.word for one in found for word in one.words) == tuple(
        word.word for word in first.words
    )
    # Every token and its log probability is there once.
    assert found[0].tokens + found[1].tokens == first.tokens
    assert found[0].logprobs + found[1].logprobs == first.logprobs


def test_a_segment_without_words_has_the_speaker_who_has_most_of_it() -> None:
    found = attribute(
        [segment("one two three four", 0.0, words=False)], turns((0.0, 0.5, "A"), (0.5, 2.0, "B"))
    )
    assert spoken(found) == [("B", " one two three four")]


def test_the_nearest_turn_within_a_second_and_nobody_beyond() -> None:
    words = segment("so", 5.0)
    assert attribute([words], turns((0.0, 4.2, "A")))[0].speaker == "A"
    assert attribute([words], turns((6.0, 7.0, "A")))[0].speaker == "A"
    assert attribute([words], turns((0.0, 4.2, "A"), (5.5, 7.0, "B")))[0].speaker == "B"
    assert attribute([words], turns((0.0, 3.9, "A"), (6.5, 7.0, "B")))[0].speaker is None
    assert attribute([words], [])[0].speaker is None


def test_even_shares_stay_with_the_speaker_before() -> None:
    even = turns((0.0, 1.0, "B"), (1.0, 1.4, "A"), (1.4, 2.0, "B"))
    before, tie = segment("Well.", 0.5), segment("Yes.", 1.2)
    assert attribute([before, tie], even)[1].speaker == "B"
    before = segment("Well.", 1.0)
    assert attribute([before, tie], even)[1].speaker == "A"


@pytest.mark.parametrize(
    ("step", "n_words", "speakers"), [(0.2, 2, "A"), (0.3, 2, "ABA"), (0.6, 1, "A")]
)
def test_two_words_and_half_a_second_of_a_sentence_may_be_anothers(
    step: float, n_words: int, speakers: str
) -> None:
    sentence = segment("I would no stop go home now", 0.0, step)
    first, last, end = (step * n for n in (2, 2 + n_words, 7))
    found = attribute([sentence], turns((0.0, first, "A"), (first, last, "B"), (last, end, "A")))
    assert [one.speaker for one in found] == list(speakers)


@pytest.mark.parametrize("marks", ["?.", "؟۔", "？。", "।।"])
def test_a_short_answer_is_a_sentence_of_its_own(marks: str) -> None:
    asks, tells = marks
    found = attribute(
        [segment(f"Are you there{asks} Yes{tells} Good, then we begin{tells}", 0.0)],
        turns((0.0, 1.2, "A"), (1.2, 1.6, "B"), (1.6, 9.0, "A")),
    )
    assert [one.speaker for one in found] == ["A", "B", "A"]


def test_a_sentence_goes_on_over_segments() -> None:
    first, second = segment("and then we went", 0.0), segment("home.", 1.6)
    found = attribute([first, second], turns((0.0, 1.5, "A"), (1.5, 3.0, "B")))
    assert [one.speaker for one in found] == ["A", "A"]
