"""Make talks with known word times by espeak-ng, to measure live transcription."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from benchmark.shared.speech import corpus
from benchmark.shared.speech.synthesis import (
    ESPEAK_VOICES,
    FRAME_S,
    UNHEARD_VOICES,
    SynthesisError,
    draw_manner,
    speak,
)
from cluster.common.messages import SAMPLE_RATE

PAUSE_S = (0.3, 1.2)
NOISE_DB = (-55.0, -40.0)


@dataclass(frozen=True, slots=True)
class Talk:
    """`pcm` is int16 [n] at 16 kHz. Each of `words` has its end in seconds."""

    pcm: NDArray[np.int16]
    words: tuple[tuple[str, float], ...]
    voice: str

    @property
    def text(self) -> str:
        return " ".join(word for word, _ in self.words)

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / SAMPLE_RATE


def make_talks(n: int, seconds: float, seed: int = 0) -> list[Talk]:
    """Make `n` talks, the same for the same arguments, in two voices that training never had and
    then in others. Raises SystemExit without espeak-ng.
    """
    rng = Random(seed)
    voices = (*UNHEARD_VOICES, *ESPEAK_VOICES)
    try:
        return [_talk(rng, seconds, voices[i % len(voices)]) for i in range(n)]
    except SynthesisError as error:
        raise SystemExit(str(error)) from error


def _talk(rng: Random, seconds: float, voice: str) -> Talk:
    manner = draw_manner(rng, (voice,))
    parts, words, at_s = [np.zeros(round(0.5 * SAMPLE_RATE), np.int16)], [], 0.5
    while at_s < seconds:
        spoken = speak(corpus.made_sentence(rng), manner)
        ends = spoken.word_frames[:, 1] * FRAME_S
        words += [
            (word, at_s + float(end)) for word, end in zip(spoken.text.split(), ends, strict=True)
        ]
        gap = np.zeros(round(rng.uniform(*PAUSE_S) * SAMPLE_RATE), np.int16)
        parts += [spoken.samples, gap]
        at_s += (len(spoken.samples) + len(gap)) / SAMPLE_RATE
    pcm = np.concatenate(parts).astype(np.float32)
    level = 32768 * 10 ** (rng.uniform(*NOISE_DB) / 20)
    pcm += np.random.default_rng(rng.getrandbits(32)).normal(0, level, len(pcm))
    return Talk(np.clip(pcm, -32768, 32767).astype(np.int16), tuple(words), voice)
