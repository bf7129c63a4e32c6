"""Vectors of voices become turns: as many speakers as there are, at the right times."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import pytest

from router.audio import clustering
from router.audio.clustering import Stretch, Turn, find_turns
from router.audio.embedding import HOP_SAMPLES, WINDOW_SAMPLES, Vectors
from router.audio.protocol import SpeakerSearch

T = TypeVar("T")
SIZE = 32
ANY = SpeakerSearch()  # number of voices


def result(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def voices(n: int, seed: int = 0) -> Vectors:
    """Directions at right angles."""
    random = np.random.default_rng(seed).standard_normal((SIZE, SIZE))
    return np.linalg.qr(random)[0][:n].astype(np.float32)


def talk(order: list[int], known: Vectors, windows: int = 5) -> tuple[Vectors, list[Stretch]]:
    """One stretch of speech for each entry of `order`, a second apart, with noisy vectors."""
    rng, vectors, stretches, at = np.random.default_rng(1), [], [], 0
    for voice in order:
        noise = 0.08 * rng.standard_normal((windows, SIZE))
        vectors.append(known[voice] + noise.astype(np.float32))
        middles = [at + WINDOW_SAMPLES // 2 + i * HOP_SAMPLES for i in range(windows)]
        end = middles[-1] + WINDOW_SAMPLES // 2
        stretches.append(Stretch(at, end, tuple(middles)))
        at = end + 16_000
    found = np.concatenate(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True), stretches


def speakers(turns: list[Turn]) -> list[int]:
    return [speaker for _, _, speaker in turns]


def test_speakers_are_numbered_by_their_first_words() -> None:
    vectors, stretches = talk([2, 0, 2, 1, 0], voices(3))
    turns = result(find_turns(vectors, stretches, ANY))
    assert speakers(turns) == [0, 1, 0, 2, 1]
    assert [turn[:2] for turn in turns] == [(one.start, one.end) for one in stretches]


@pytest.mark.parametrize(("least", "most", "n"), [(1, None, 3), (1, 2, 2), (4, None, 4), (1, 1, 1)])
def test_the_count_keeps_within_its_bounds(least: int, most: int | None, n: int) -> None:
    vectors, stretches = talk([0, 1, 2, 0, 1, 2], voices(3))
    turns = result(find_turns(vectors, stretches, SpeakerSearch(least=least, most=most)))
    assert len(set(speakers(turns))) == n


def test_two_levels_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, stretches = talk([0, 1, 2, 3] * 6, voices(4))
    whole = result(find_turns(vectors, stretches, ANY))
    monkeypatch.setattr(clustering, "MOST_AT_ONCE", 30)
    assert result(find_turns(vectors, stretches, ANY)) == whole


def test_a_change_without_a_pause_parts_the_stretch() -> None:
    vectors, _ = talk([0, 1], voices(2))
    middles = tuple(WINDOW_SAMPLES // 2 + i * HOP_SAMPLES for i in range(10))
    one = Stretch(0, middles[-1] + WINDOW_SAMPLES // 2, middles)
    (start, border, first), (again, end, second) = result(find_turns(vectors, [one], ANY))
    assert (start, first, again, end, second) == (0, 0, border, one.end, 1)
    assert middles[4] < border < middles[5]


def test_a_short_word_goes_on_with_the_voice_before() -> None:
    vectors, stretches = talk([0, 1], voices(2))
    end = stretches[-1].end
    turns = result(find_turns(vectors, [*stretches, Stretch(end + 9, end + 99, ())], ANY))
    assert turns[-1] == (end + 9, end + 99, 1)


def test_speech_too_short_for_any_vector_has_one_speaker() -> None:
    nothing = np.empty((0, 1), np.float32)
    assert result(find_turns(nothing, [Stretch(5, 9, ())], ANY)) == [(5, 9, 0)]
    assert result(find_turns(nothing, [], ANY)) == []


def test_known_voices_come_first_and_one_to_one() -> None:
    every = voices(4)
    vectors, stretches = talk([0, 1, 2, 1], every)
    known = [every[3], every[1], every[1]]  # nobody, and one voice twice
    turns = result(find_turns(vectors, stretches, ANY, known))
    assert speakers(turns)[0] == 3
    assert speakers(turns)[2] == 4
    assert speakers(turns)[1] == speakers(turns)[3] in (1, 2)
