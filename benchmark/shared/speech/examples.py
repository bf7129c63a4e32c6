"""Make new speech to measure a demo checkpoint, with random voices, gains, silences and noise."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from benchmark.shared.speech.synthesis import (
    EDGE_FRAMES,
    ESPEAK_VOICES,
    FLITE_VOICES,
    FRAME_S,
    FRAME_SAMPLES,
    RefusedError,
    Spoken,
    draw_manner,
    speak,
)
from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES

SEED = "evaluation"
TextSource = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Example:
    """A window's audio (float32, up to 30 s), and its segments (start, end, text) in seconds."""

    audio: npt.NDArray[np.float32]
    segments: list[tuple[float, float, str]]

    @property
    def text(self) -> str:
        return " ".join(text for _, _, text in self.segments)


class ExampleMaker:
    def __init__(self, seed: str) -> None:
        self.rng = Random(f"{SEED}/{seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(64))

    def speak(self, source: TextSource, voices: tuple[str, ...] | None = None) -> Spoken:
        """Speak a new utterance; half of them are by flite unless `voices` are given."""
        rng = self.rng
        text = source(rng)
        while True:
            heard = voices or (FLITE_VOICES if rng.random() < 0.5 else ESPEAK_VOICES)
            try:
                return speak(text, draw_manner(rng, heard))
            except RefusedError:
                continue

    def alone(self, source: TextSource, voices: tuple[str, ...] | None = None) -> Example:
        """Return one utterance after 0 to 0.9 s of silence."""
        lead = self.rng.randint(0, 45)
        return self._finish([(lead, self.speak(source, voices))])

    def several(self, source: TextSource, gaps_s: tuple[float, float] = (0.1, 0.9)) -> Example:
        """Return utterances that fill 20 to 30 s."""
        rng = self.rng
        limit = rng.randint(round(20.0 / FRAME_S), round(30.0 / FRAME_S))
        at = rng.randint(0, 20)
        placed: list[tuple[int, Spoken]] = []
        while True:
            spoken = self.speak(source)
            if placed and at + len(spoken.sounds) > limit:
                return self._finish(placed)
            placed.append((at, spoken))
            at += len(spoken.sounds) + round(rng.uniform(*gaps_s) / FRAME_S)

    def empty(self) -> Example:
        audio = np.zeros(self.rng.randint(2, 30) * SAMPLE_RATE, np.float32)
        if self.rng.random() < 0.7:
            level = 10 ** (self.rng.uniform(-80, -20) / 20)
            audio += level * self.noise.standard_normal(len(audio), np.float32)
        return Example(audio, [])

    def _finish(self, placed: list[tuple[int, Spoken]]) -> Example:
        rng = self.rng
        last = max(at + len(spoken.sounds) for at, spoken in placed)
        n_samples = min(WINDOW_SAMPLES, last * FRAME_SAMPLES + rng.randint(0, SAMPLE_RATE))
        audio = np.zeros(n_samples, np.float32)
        segments = []
        for at, spoken in placed:
            begin = at * FRAME_SAMPLES
            piece = spoken.samples.astype(np.float32) * (10 ** (rng.uniform(-12, 6) / 20) / 32768)
            audio[begin : begin + len(piece)] += piece
            end = at + len(spoken.sounds) - EDGE_FRAMES
            segments.append((FRAME_S * (at + EDGE_FRAMES), FRAME_S * end, spoken.text))
        if rng.random() < 0.7:
            level = 10 ** (rng.uniform(-70, -38) / 20)
            audio += level * self.noise.standard_normal(n_samples, np.float32)
        return Example(audio, segments)
