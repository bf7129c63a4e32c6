"""Spoken utterances on disk: shards of int16 audio with their text, word times and sounds.

One shard is made by one process from one seed, so that shards are made in parallel, in any order,
and an interrupted run repeats only the unfinished ones. A reader takes what exists: training starts
on the first shards while the others are made. Knows nothing of windows, noise or tokens.

    python -m cluster.demo.recipe.speech.store --out DIR --shards 20 --jobs 2
"""

import argparse
import json
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from rich.progress import track

from cluster.demo.recipe.speech import corpus, lexicon
from cluster.demo.recipe.speech.synthesis import (
    ESPEAK_VOICES,
    FLITE_VOICES,
    FRAME_SAMPLES,
    Manner,
    Spoken,
    SynthesisError,
    Synthesizer,
    draw_manner,
)

DRAW_SHARES = {"made": 0.25, "free": 0.40, "woven": 0.35}
SHARD_SIZE = 2_000  # utterances, about 1.6 hours


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stored utterance; arrays are views, on the grid of 20 ms.

    samples int16 (n_frames * 320,), word_frames int32 (n_words, 2), sounds int16 (n_frames,)
    with 0 for silence.
    """

    text: str
    voice: str
    samples: npt.NDArray[np.int16]
    word_frames: npt.NDArray[np.int32]
    sounds: npt.NDArray[np.int16]


class SpeechStore:
    """Reads the finished shards of a folder; `rescan` picks up those made since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sounds: list[str] = json.loads((folder / "sounds.json").read_text())
        self._names: list[str] = []
        self._pairs = corpus.made_pairs()
        self._kinds: dict[str, list[Utterance]] = {}
        self.rescan()

    def __len__(self) -> int:
        return sum(len(utterances) for utterances in self._kinds.values())

    def rescan(self) -> None:
        """Open the shards finished since the last call."""
        for path in sorted(self.folder.glob("shard-*.json")):
            if path.stem not in self._names:
                self._names.append(path.stem)
                for kind, utterance in _read_shard(path):
                    if kind == "made" and corpus.surprises(utterance.text, self._pairs):
                        kind = "free"
                    self._kinds.setdefault(kind, []).append(utterance)

    def draw(self, rng: Random) -> Utterance:
        """One utterance; what the grammar would not guess more often than it was made."""
        kinds = list(self._kinds)
        kind = rng.choices(kinds, [DRAW_SHARES[k] for k in kinds])[0]
        return rng.choice(self._kinds[kind])


def _read_shard(path: Path) -> list[tuple[str, Utterance]]:
    meta = json.loads(path.read_text())
    audio = np.memmap(path.with_suffix(".i16"), dtype=np.int16, mode="r")
    arrays = np.load(path.with_suffix(".npz"))
    words, sounds = arrays["words"], arrays["sounds"]
    utterances, word, frame = [], 0, 0
    columns = (meta[name] for name in ("kinds", "texts", "voices", "frames"))
    for kind, text, voice, n_frames in zip(*columns, strict=True):
        n_words = len(text.split())
        utterance = Utterance(
            text,
            voice,
            audio[frame * FRAME_SAMPLES : (frame + n_frames) * FRAME_SAMPLES],
            words[word : word + n_words],
            sounds[frame : frame + n_frames],
        )
        utterances.append((kind, utterance))
        word += n_words
        frame += n_frames
    return utterances


def sound_inventory() -> list[str]:
    """Every sound name the voices use for the known words; index 0 is silence, 1 the rest."""
    speaker = Synthesizer()
    names: set[str] = set()
    text = " ".join(lexicon.all_words())
    for voice in ("kal16", *(v for v in ESPEAK_VOICES if "+" not in v)):
        names.update(speaker.speak(text, Manner(voice, 175, 50, 1.0, 1.0)).sounds)
    return ["", "?", *sorted(names - {""})]


def write_shard(folder: Path, index: int, seed: int, size: int = SHARD_SIZE) -> None:
    """Make shard `index` unless it exists. The .json comes last: it marks the shard as finished."""
    base = folder / f"shard-{index:04d}"
    if base.with_suffix(".json").exists():
        return
    codes = {name: i for i, name in enumerate(json.loads((folder / "sounds.json").read_text()))}
    rng = Random(f"{seed}/{index}")
    speaker = Synthesizer()
    made: list[Spoken] = []
    kinds: list[str] = []
    while len(made) < size:
        # The voice is drawn first, so that a voice that refuses a text does not become rarer.
        manner = draw_manner(rng, FLITE_VOICES if rng.random() < 0.5 else ESPEAK_VOICES)
        try:
            kind, text = corpus.spoken_sentence(rng)
            made.append(speaker.speak(text, manner))
            kinds.append(kind)
        except SynthesisError:
            continue
    np.concatenate([spoken.samples for spoken in made]).tofile(base.with_suffix(".i16"))
    sounds = [codes.get(name, 1) for spoken in made for name in spoken.sounds]
    np.savez(
        base.with_suffix(".npz"),
        words=np.concatenate([spoken.word_frames for spoken in made]),
        sounds=np.array(sounds, dtype=np.int16),
    )
    meta = {
        "kinds": kinds,
        "texts": [spoken.text for spoken in made],
        "voices": [spoken.voice for spoken in made],
        "frames": [len(spoken.sounds) for spoken in made],
    }
    part = base.with_suffix(".part")
    part.write_text(json.dumps(meta))
    part.rename(base.with_suffix(".json"))


def make_store(folder: Path, shards: int, seed: int, jobs: int) -> None:
    """Make every missing shard with `jobs` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    inventory = folder / "sounds.json"
    if not inventory.exists():
        inventory.write_text(json.dumps(sound_inventory()))
    tasks = [(folder, index, seed) for index in range(shards)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=4) as pool:
        results = [pool.apply_async(write_shard, task) for task in tasks]
        for result in track(results, description="speaking"):
            result.get()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    make_store(arguments.out, arguments.shards, arguments.seed, arguments.jobs)


if __name__ == "__main__":
    main()
