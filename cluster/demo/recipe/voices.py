"""Synthetic speakers for the small network of speaker embeddings, and what they say, as features.

A speaker is a variant of an espeak-ng voice with formants, voicing, pitch and manner of its own,
or a voice of flite played at a speed of its own. Each utterance has a pitch and a rate of its own,
so that neither tells who speaks. One shard is made from one seed, and a finished one is kept.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from scipy.signal import fftconvolve

from benchmark.shared.speech import corpus
from benchmark.shared.speech.synthesis import Manner, SynthesisError, Synthesizer
from cluster.common.messages import SAMPLE_RATE
from router.audio.embedding import fbank

ESPEAK_DATA = Path("/usr/lib/x86_64-linux-gnu/espeak-ng-data")
ACCENTS = ("en-us", "en-us-nyc", "en", "en-gb-x-rp", "en-gb-scotland", "en-029")
FOREIGN = ("de", "fr", "es", "it", "nl", "pl", "pt", "sv")  # read English as if it were theirs
FLITE = ("awb", "kal16")  # slt and rms are for the measurement alone
UTTERANCES = 7
SPEAKERS = 50  # in a shard


def variant(rng: Random) -> str:
    """The text of an espeak-ng voice variant that nobody has heard."""
    tract = rng.uniform(0.84, 1.28)
    low = rng.uniform(62, 190)
    tilt = rng.uniform(-0.12, 0.08)
    lines = [
        "language variant",
        f"pitch {low:.0f} {low * rng.uniform(1.2, 1.7):.0f}",
        f"flutter {rng.choice((0, 0, 2, 5, 10, 20))}",
        f"roughness {rng.choice((0, 0, 1, 2, 3, 4))}",
        f"voicing {rng.uniform(60, 160):.0f}",
        f"consonants {rng.uniform(50, 150):.0f} {rng.uniform(60, 150):.0f}",
        f"intonation {rng.choice((1, 1, 2, 3, 4))}",
        "stressAdd " + " ".join(f"{rng.uniform(-30, 70):.0f}" for _ in range(8)),
    ]
    if rng.random() < 0.3:
        lines.append(f"klatt {rng.randint(1, 5)}")
    for i in range(9):
        scale = rng.uniform(0.7, 1.2) if i == 0 else tract * rng.lognormvariate(0, 0.08)
        height = 100 * rng.lognormvariate(0, 0.22) * (1 + tilt * i)
        width = 110 * rng.lognormvariate(0, 0.28)
        shift = rng.uniform(-250, 250) if 0 < i < 3 and rng.random() < 0.15 else 0
        lines.append(f"formant {i} {100 * scale:.0f} {height:.0f} {width:.0f} {shift:.0f}")
    if rng.random() < 0.4:
        lines.append("breath 0 " + " ".join(str(rng.randint(0, 5)) for _ in range(7)))
    if rng.random() < 0.3:
        points = (f"{hz} {rng.randint(70, 255)}" for hz in (150, 600, 1500, 3000, 5000))
        lines.append("tone " + " ".join(points))
    return "\n".join(lines) + "\n"


class VoiceMaker:
    """Speaks with new voices: espeak-ng reads its data from a copy, to which variants are added."""

    def __init__(self, folder: Path) -> None:
        self.variants = folder / "espeak-ng-data" / "voices" / "!v"
        self.variants.mkdir(parents=True, exist_ok=True)
        for path in ESPEAK_DATA.iterdir():
            link = self.variants.parents[1] / path.name
            if path.name != "voices" and not link.exists():
                link.symlink_to(path)
        os.environ["ESPEAK_DATA_PATH"] = str(folder)
        self.speaker = Synthesizer()

    def utterances(self, rng: Random) -> Iterator[npt.NDArray[np.float32]]:
        """What one new speaker says: float32 in -1..1, each of another pitch and rate."""
        if rng.random() < 0.03:
            manner = Manner(rng.choice(FLITE), 0, 0, 1.0, rng.uniform(0.82, 1.25))
        else:
            name = f"v{rng.getrandbits(48):x}"
            (self.variants / name).write_text(variant(rng))
            language = rng.choice(FOREIGN if rng.random() < 0.2 else ACCENTS)
            manner = Manner(f"{language}+{name}", rng.randint(125, 195), 0, 1.0, 1.0)
        made = 0
        while made < UTTERANCES:
            said = replace(
                manner,
                pitch=rng.randint(20, 80),
                rate_wpm=round(manner.rate_wpm * rng.uniform(0.88, 1.14)),
                stretch=rng.uniform(0.85, 1.15),
            )
            try:
                spoken = self.speaker.speak(corpus.spoken_sentence(rng), said)
            except SynthesisError:
                continue
            made += 1
            yield in_a_room(spoken.samples.astype(np.float32) / np.float32(32768), rng)


def in_a_room(audio: npt.NDArray[np.float32], rng: Random) -> npt.NDArray[np.float32]:
    """Sixty per cent of the time with reverberation; always with a gain and a little noise."""
    noise = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.6:
        decay_s = rng.uniform(0.08, 0.6)
        n = int(decay_s * SAMPLE_RATE)
        tail = noise.standard_normal(n) * np.exp(-6.9 * np.arange(n) / n)
        tail *= rng.uniform(0.05, 0.7) / np.sqrt((tail**2).sum())
        tail[0] = 1.0
        audio = fftconvolve(audio, tail)[: len(audio)]
    level = 10 ** (rng.uniform(-80, -40) / 20)
    noisy = audio * 10 ** (rng.uniform(-15, 3) / 20) + level * noise.standard_normal(len(audio))
    return noisy.astype(np.float32)


def write_shard(folder: Path, index: int) -> Path:
    """Make the features of `SPEAKERS` new speakers, unless the shard is there. Returns its file.

    It holds `features` float16 (n, 80) and `starts` int64 (SPEAKERS * UTTERANCES + 1,).
    """
    path = folder / f"speakers-{index:03d}.npz"
    if path.exists():
        return path
    maker = VoiceMaker(folder / f"voices-{index:03d}")
    made = [
        fbank(audio * 32768)
        for i in range(SPEAKERS)
        for audio in maker.utterances(Random(f"speakers/{index}/{i}"))
    ]
    part = path.with_suffix(".part.npz")
    starts = np.cumsum([0] + [len(features) for features in made])
    np.savez(part, features=np.concatenate(made).astype(np.float16), starts=starts)
    part.rename(path)
    shutil.rmtree(folder / f"voices-{index:03d}")
    return path
