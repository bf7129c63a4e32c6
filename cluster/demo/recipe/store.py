"""Spoken utterances on disk: shards of int16 audio with their text, word times and sounds.

Each shard is made from one seed, so that they are made in parallel, in any order, and an
interrupted run repeats only the unfinished ones.
"""

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from rich.progress import track

from benchmark.shared.speech import corpus, lexicon
from benchmark.shared.speech.synthesis import (
    ESPEAK_VOICES,
    FLITE_VOICES,
    FRAME_SAMPLES,
    Manner,
    Spoken,
    SynthesisError,
    Synthesizer,
    draw_manner,
)

KINDS = {"made": 0.25, "free": 0.40, "woven": 0.35}  # of all sentences that are trained on
SHARD_SIZE = 2_000  # utterances, about 1.6 hours


@dataclass(frozen=True, slots=True)
class Utterance:
    """Arrays are views, on the grid of 20 ms: samples int16 (n_frames * 320,), word_frames int32
    (n_words, 2), sounds int16 (n_frames,) with 0 for silence.
    """

    text: str
    samples: npt.NDArray[np.int16]
    word_frames: npt.NDArray[np.int32]
    sounds: npt.NDArray[np.int16]


class SpeechStore:
    def __init__(self, folder: Path) -> None:
        self.sounds: list[str] = json.loads((folder / "sounds.json").read_text())
        shards = sorted(folder.glob("shard-*.json"))
        self.utterances = [utterance for path in shards for utterance in _read_shard(path)]

    def draw(self, rng: Random) -> Utterance:
        return rng.choice(self.utterances)


def _read_shard(path: Path) -> Iterator[Utterance]:
    meta = json.loads(path.read_text())
    audio = np.memmap(path.with_suffix(".i16"), dtype=np.int16, mode="r")
    arrays = np.load(path.with_suffix(".npz"))
    words, sounds = arrays["words"], arrays["sounds"]
    word = frame = 0
    for text, n_frames in zip(meta["texts"], meta["frames"], strict=True):
        n_words = len(text.split())
        yield Utterance(
            text,
            audio[frame * FRAME_SAMPLES : (frame + n_frames) * FRAME_SAMPLES],
            words[word : word + n_words],
            sounds[frame : frame + n_frames],
        )
        word += n_words
        frame += n_frames


def sound_inventory() -> list[str]:
    """Every sound name the voices use for the known words; index 0 is silence, 1 the rest."""
    speaker = Synthesizer()
    names: set[str] = set()
    text = " ".join(lexicon.all_words())
    for voice in ("kal16", *(v for v in ESPEAK_VOICES if "+" not in v)):
        names.update(speaker.speak(text, Manner(voice, 175, 50, 1.0, 1.0)).sounds)
    return ["", "?", *sorted(names - {""})]


def write_shard(folder: Path, index: int, seed: int, size: int) -> None:
    """Make shard `index` unless it exists. The .json comes last: it marks the shard as finished."""
    base = folder / f"shard-{index:04d}"
    if base.with_suffix(".json").exists():
        return
    codes = {name: i for i, name in enumerate(json.loads((folder / "sounds.json").read_text()))}
    rng = Random(f"{seed}/{index}")
    speaker = Synthesizer()
    made: list[Spoken] = []
    while len(made) < size:
        # The voice is drawn first, so that a voice that refuses a text does not become rarer.
        manner = draw_manner(rng, FLITE_VOICES if rng.random() < 0.5 else ESPEAK_VOICES)
        try:
            made.append(speaker.speak(corpus.spoken_sentence(rng, KINDS), manner))
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
        "texts": [spoken.text for spoken in made],
        "frames": [len(spoken.sounds) for spoken in made],
    }
    part = base.with_suffix(".part")
    part.write_text(json.dumps(meta))
    part.rename(base.with_suffix(".json"))


def make_store(folder: Path, shards: int, seed: int, jobs: int, size: int = SHARD_SIZE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inventory = folder / "sounds.json"
    if not inventory.exists():
        inventory.write_text(json.dumps(sound_inventory()))
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=4) as pool:
        tasks = [(folder, index, seed, size) for index in range(shards)]
        results = [pool.apply_async(write_shard, task) for task in tasks]
        for result in track(results, description="speaking"):
            result.get()
