"""Recordings of minutes by the demo model's own voices, with what is said when; and word errors.

Glued: nobody pauses between two sentences, and cuts have to fall into speech.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import jiwer
import numpy as np

from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.synthesis import (
    EDGE_FRAMES,
    FRAME_S,
    Manner,
    SynthesisError,
    Synthesizer,
)
from benchmark.shared.speech.wav import to_pcm
from benchmark.shared.word_errors import WordErrors
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.demo.samples import words_of

EDGE_S = EDGE_FRAMES * FRAME_S  # around each sentence: all that stays of a pause that is glued
PAUSES_S = (0.1, 0.9)
PAUSED_S = (60.0, 120.0, 180.0, 300.0)  # lengths of the long set
GLUED_S = (90.0, 150.0, 240.0)


@dataclass(frozen=True, slots=True)
class Sentence:
    """What is said from `start` to `end`, in s from the recording's start."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Recording:
    """pcm: int16 [n_samples], 16 kHz."""

    name: str
    pcm: Pcm
    sentences: tuple[Sentence, ...]

    @property
    def seconds(self) -> float:
        return self.pcm.shape[0] / SAMPLE_RATE

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)

    def alone(self, sentence: Sentence) -> Pcm:
        first, last = sentence.start - EDGE_S, sentence.end + EDGE_S
        return self.pcm[max(0, round(first * SAMPLE_RATE)) : round(last * SAMPLE_RATE)]


def missing_voices() -> str | None:
    speaker = Synthesizer()
    for voice in ("en-us", "slt"):
        try:
            speaker.speak("Hello.", Manner(voice, 175, 50, 1.0, 1.0))
        except SynthesisError as error:
            return str(error)
    return None


def long_set(scale: float = 1.0) -> list[Recording]:
    return [
        *(make_recording(scale * seconds) for seconds in PAUSED_S),
        *(make_recording(scale * seconds, glued=True) for seconds in GLUED_S),
    ]


def make_recording(seconds: float, *, glued: bool = False) -> Recording:
    name = f"{'glued' if glued else 'paused'}, {seconds:g} s"
    maker = ExampleMaker(f"long/{name}")
    pieces, sentences, end_s = [], [], 0.0
    while end_s < seconds:
        gaps_s = (0.0, 0.0) if glued else PAUSES_S
        example = maker.several(corpus.sentence, gaps_s)
        first_s, last_s = _span(example) if glued else (0.0, len(example.audio) / SAMPLE_RATE)
        piece = example.audio[round(first_s * SAMPLE_RATE) : round(last_s * SAMPLE_RATE)]
        shift_s = end_s - first_s
        sentences += [Sentence(s + shift_s, e + shift_s, text) for s, e, text in example.segments]
        pieces.append(piece)
        end_s += len(piece) / SAMPLE_RATE
    return Recording(name, to_pcm(np.concatenate(pieces)), tuple(sentences))


def _span(example: Example) -> tuple[float, float]:
    return example.segments[0][0] - EDGE_S, example.segments[-1][1] + EDGE_S


def errors_by_sentence(recording: Recording, heard: str) -> list[WordErrors]:
    """By the sentence that they are in; an added word is in that of the word before."""
    said = [words_of(sentence.text) for sentence in recording.sentences]
    ends = list(accumulate(len(words) for words in said))
    counts = [[len(words), 0, 0, 0] for words in said]
    reference = " ".join(word for words in said for word in words)
    alignment = jiwer.process_words(reference, " ".join(words_of(heard))).alignments[0]
    kinds = {"substitute": 1, "delete": 2, "insert": 3}
    for chunk in alignment:
        if chunk.type == "equal":
            continue
        n_added = chunk.hyp_end_idx - chunk.hyp_start_idx
        if chunk.type == "insert":
            at = max(0, chunk.ref_start_idx - 1)
            counts[bisect_right(ends, at)][3] += n_added
            continue
        for at in range(chunk.ref_start_idx, chunk.ref_end_idx):
            counts[bisect_right(ends, at)][kinds[chunk.type]] += 1
    return [WordErrors(*count) for count in counts]
