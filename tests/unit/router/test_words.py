"""Words and edges are those of openai/whisper's `add_word_timestamps` on the same alignment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whisper import timing

from cluster.common.messages import TokenAlignment
from router.transcript import Segment
from router.words import add_words, ends_sentence
from tests.support.references.openai_vocabulary import openai_tokenizer, with_openai_vocabulary

FRAME_S = 0.02
PARTS = (
    " and", " the", " thing", " w", "ords", "naïve", " Köln", "日", "本語", "こ", " ", "\n", "😀",
    ".", ",", "?", "!", "...", "。", "、", "”", ")", "'", ":", "-", "。）",
    ' "', " (", " “", " -", " ¿", " .",
)  # fmt: skip


@dataclass
class Case:
    """A window's segments (start, end, text), when its tokens are spoken, and what came before."""

    segments: list[tuple[float, float, str]]
    times_s: list[float]
    language: str = "en"
    seek: int = 0
    last_speech_s: float = 0.0
    probs: list[float] | None = None

    def __post_init__(self) -> None:
        self.tokenizer = openai_tokenizer(self.language)
        self.tokens = [self.tokenizer.encoding.encode_ordinary(t) for *_, t in self.segments]
        n = sum(map(len, self.tokens))
        self.times_s = self.times_s[: n + 1]
        assert len(self.times_s) == n + 1
        self.probs = (self.probs or [0.5] * n)[:n]

    def ours(self) -> list[Segment]:
        segments = [
            Segment(i, self.seek, start, end, text, self._stamped(tokens), 0.0, -0.1, 1.0, 0.0)
            for i, ((start, end, text), tokens) in enumerate(
                zip(self.segments, self.tokens, strict=True)
            )
        ]
        text_tokens = tuple(token for own in self.tokens for token in own)
        return add_words(
            segments,
            TokenAlignment(text_tokens, tuple(self.times_s), tuple(self.probs or ())),
            with_openai_vocabulary(),
            language=self.language,
            offset_s=self.seek / 100,
            last_speech_s=self.last_speech_s,
        )

    def theirs(self) -> list[dict[str, Any]]:
        segments = [
            {"seek": self.seek, "start": start, "end": end, "text": text, "tokens": tokens}
            for (start, end, text), tokens in zip(self.segments, self.tokens, strict=True)
        ]
        with patch.object(timing, "find_alignment", self._find_alignment):
            timing.add_word_timestamps(
                segments=segments,
                model=None,
                tokenizer=self.tokenizer,
                mel=None,
                num_frames=3000,
                last_speech_timestamp=self.last_speech_s,
            )
        return segments

    def _stamped(self, tokens: list[int]) -> tuple[int, ...]:
        begin = with_openai_vocabulary().special.timestamp_begin
        return (begin, *tokens, begin + 1)

    def _find_alignment(
        self, model: Any, tokenizer: Any, tokens: list[int], *_: Any
    ) -> list[timing.WordTiming]:
        words, groups = tokenizer.split_to_word_tokens([*tokens, tokenizer.eot])
        bounds = list(accumulate((len(group) for group in groups[:-1]), initial=0))
        times, probs = np.array(self.times_s), self.probs or []
        return [
            timing.WordTiming(word, group, times[a], times[b], np.mean(probs[a:b]))
            for word, group, (a, b) in zip(words, groups, pairwise(bounds), strict=False)
        ]


def assert_equal(case: Case) -> None:
    for ours, theirs in zip(case.ours(), case.theirs(), strict=True):
        assert [word.word for word in ours.words] == [word["word"] for word in theirs["words"]]
        for word, expected in zip(ours.words, theirs["words"], strict=True):
            assert (word.start, word.end) == (expected["start"], expected["end"]), word
            assert word.probability == pytest.approx(expected["probability"])
        assert (ours.start, ours.end) == (theirs["start"], theirs["end"])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    texts = draw(st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), max_size=4))
    n = len(openai_tokenizer("en").encoding.encode_ordinary("".join(map("".join, texts)))) + 20
    steps = st.one_of(st.sampled_from([0, 5, 10, 15]), st.integers(0, 150))
    ends = list(accumulate(draw(st.lists(steps, min_size=n, max_size=n)), initial=0))
    seek = draw(st.one_of(st.just(0), st.integers(0, 100_000)))
    near = st.builds(lambda end, by: max(0, end + by), st.sampled_from(ends), st.integers(-30, 30))
    marks = sorted(draw(st.lists(near, min_size=8, max_size=8)))
    segments = [
        (seek / 100 + FRAME_S * marks[2 * i], seek / 100 + FRAME_S * marks[2 * i + 1], text)
        for i, text in enumerate(texts)
    ]
    return Case(
        segments,
        [end / 50 for end in ends],
        language=draw(st.sampled_from(["en", "ja"])),
        seek=seek,
        last_speech_s=draw(st.sampled_from([0.0, seek / 100, max(0.0, seek / 100 - 3)])),
        probs=draw(st.lists(st.floats(0, 1), min_size=n, max_size=n)),
    )


@settings(deadline=None, max_examples=200)
@given(cases())
def test_words_and_edges_of_any_alignment_are_the_references(case: Case) -> None:
    assert_equal(case)


@pytest.mark.parametrize(
    "text", ["Yes.", "Yes!) ", "好吗？", "「好！」", "है।", "ہے۔", "نعم؟", "So…"]
)
def test_a_sentence_ends_in_any_script(text: str) -> None:
    assert ends_sentence(text)
    assert not ends_sentence(f"{text} and")
    assert not ends_sentence(text[:2])
