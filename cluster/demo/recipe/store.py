"""Synthetic utterances on disk: shards of int16 audio with texts, word times and sounds.

Each shard has a seed of its own, so shards are made in parallel and an interrupted run continues.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track

from benchmark.shared.speech import corpus
from benchmark.shared.speech.synthesis import (
    ESPEAK_VOICES,
    FLITE_VOICES,
    FRAME_SAMPLES,
    RefusedError,
    Spoken,
    draw_manner,
    speak,
)

KINDS = {"made": 0.25, "free": 0.40, "woven": 0.35}  # shares of the kinds of sentences
SHARD_SIZE = 2_000  # utterances, about 1.6 hours
SEED = 1


@dataclass(frozen=True, slots=True)
class Utterance:
    """On a grid of 20 ms frames: samples int16 (n_frames * 320,), word_frames int32 (n_words, 2),
    sounds int64 (n_frames,), which are indices into the store's `sounds`; 0 is silence.
    """

    text: str
    samples: npt.NDArray[np.int16]
    word_frames: npt.NDArray[np.int32]
    sounds: npt.NDArray[np.int64]


class SpeechStore:
    """sounds: the names of all sounds of the voices; the first is "", silence."""

    def __init__(self, folder: Path) -> None:
        shards = {path: np.load(path) for path in sorted(folder.glob("shard-*.npz"))}
        self.sounds = sorted({"", *(name for one in shards.values() for name in one["sounds"])})
        self.utterances = [u for path, one in shards.items() for u in self._read(path, one)]

    def draw(self, rng: Random) -> Utterance:
        return rng.choice(self.utterances)

    def _read(self, path: Path, shard: Any) -> Iterable[Utterance]:
        texts, ends = shard["texts"].tolist(), np.cumsum(shard["frames"])[:-1]
        audio = np.memmap(path.with_suffix(".i16"), np.int16, "r")
        sounds = np.array([self.sounds.index(name) for name in shard["sounds"]])[shard["codes"]]
        n_words = [len(text.split()) for text in texts]
        return map(
            Utterance,
            texts,
            np.split(audio, ends * FRAME_SAMPLES),
            np.split(shard["words"], np.cumsum(n_words)[:-1]),
            np.split(sounds, ends),
        )


def write_shard(folder: Path, index: int) -> None:
    """Make shard `index` unless it exists. Its .npz is written last and marks it as finished."""
    base = folder / f"shard-{index:04d}"
    if base.with_suffix(".npz").exists():
        return
    rng = Random(f"{SEED}/{index}")
    made: list[Spoken] = []
    while len(made) < SHARD_SIZE:
        # Draw the voice first, so that voices that refuse some texts do not become rarer.
        manner = draw_manner(rng, FLITE_VOICES if rng.random() < 0.5 else ESPEAK_VOICES)
        try:
            made.append(speak(corpus.spoken_sentence(rng, KINDS), manner))
        except RefusedError:
            continue
    np.concatenate([spoken.samples for spoken in made]).tofile(base.with_suffix(".i16"))
    said = [name for spoken in made for name in spoken.sounds]
    sounds, codes = np.unique(said, return_inverse=True)
    part = folder / f"part-{index:04d}.npz"
    np.savez(
        part,
        texts=[spoken.text for spoken in made],
        frames=[len(spoken.sounds) for spoken in made],
        words=np.concatenate([spoken.word_frames for spoken in made]),
        sounds=sounds,
        codes=codes,
    )
    part.rename(base.with_suffix(".npz"))


def make_store(folder: Path, shards: int, jobs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=4) as pool:
        made = [pool.submit(write_shard, folder, index) for index in range(shards)]
        for one in track(made, description="speaking"):
            one.result()
