"""Make the recordings that ship with the demo checkpoint: about 5, 25 and 70 s.

    python -m cluster.demo.recipe.make_samples [--checkpoint DIR] [--out DIR]

Made sentences from a seed of their own, by voices of the recipe, one voice per recording, with
pauses of 0.4 to 1.2 s. They are chosen: a sentence that the checkpoint does not get right, alone or
in its recording as the server transcribes it, is replaced by another. Beside each .flac stand its
text and, in a .json, the times of its sentences.
"""

import argparse
import json
import os
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from rich.console import Console

from cluster.demo.recipe.alone import LoneModel
from cluster.demo.recipe.evaluate import score, score_served
from cluster.demo.recipe.examples import Example
from cluster.demo.recipe.export import CHECKPOINT
from cluster.demo.recipe.speech import corpus
from cluster.demo.recipe.speech.synthesis import (
    EDGE_FRAMES,
    FRAME_S,
    FRAME_SAMPLES,
    Spoken,
    SynthesisError,
    Synthesizer,
    draw_manner,
)
from cluster.demo.recipe.speech.wav import to_pcm
from cluster.demo.samples import words_of
from cluster.errors import ConfigurationError
from cluster.messages import SAMPLE_RATE

SAMPLES = Path(__file__).parents[1] / "samples"
RECORDINGS = (("short", 5.0, "slt"), ("medium", 25.0, "en-us+f2"), ("long", 70.0, "rms"))
NOISE_DB = -60.0
MAX_ROUNDS = 40
MAX_SENTENCES = 200  # tried in vain


@dataclass(slots=True)
class Recording:
    """Sentences of one voice with their places, in frames of 20 ms."""

    spoken: list[Spoken]
    starts: list[int]
    noise: npt.NDArray[np.float32]

    def end(self, i: int) -> int:
        """The frame behind sentence i."""
        return self.starts[i] + len(self.spoken[i].sounds)

    def audio(self) -> npt.NDArray[np.float32]:
        """All of it, float32."""
        total = np.zeros((self.end(len(self.spoken) - 1) + 25) * FRAME_SAMPLES, np.float32)
        for spoken, start in zip(self.spoken, self.starts, strict=True):
            piece = spoken.samples.astype(np.float32) / 32768
            total[start * FRAME_SAMPLES : start * FRAME_SAMPLES + len(piece)] += piece
        return total + 10 ** (NOISE_DB / 20) * self.noise[: len(total)]

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(spoken.text for spoken in self.spoken)

    def wrong_sentences(self, heard: str) -> list[int]:
        """The sentences whose words are not as said in what was heard."""
        owners = [i for i, spoken in enumerate(self.spoken) for _ in words_of(spoken.text)]
        matcher = SequenceMatcher(None, words_of(self.text), words_of(heard), autojunk=False)
        wrong = set()
        for kind, first, last, _, _ in matcher.get_opcodes():
            if kind != "equal":
                wrong.update(owners[first : max(last, first + 1)] or owners[-1:])
        return sorted(wrong)


class SampleMaker:
    """Draws sentences that the checkpoint hears right, and lays them out."""

    def __init__(self, checkpoint: Path, seed: str) -> None:
        self.checkpoint = checkpoint
        self.model = LoneModel(checkpoint)
        self.rng = Random(f"samples/{seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(64))
        self.speaker = Synthesizer()

    def heard_right(self, example: Example) -> bool:
        """Whether the text comes out without an error, with timestamps and without."""
        return not any(score(self.model, [example], timed).wrong for timed in (True, False))

    def served_wrong(self, recording: Recording) -> list[int]:
        """The sentences that do not come out right through the whole served path."""
        example = Example(recording.audio(), [(0.0, 0.0, recording.text)])
        wrong = score_served(self.checkpoint, {"": [example]}, lambda: None)[""].wrong
        return recording.wrong_sentences(wrong[0][1]) if wrong else []

    def sentence(self, voice: str) -> Spoken:
        """A new sentence of the voice that is heard right on its own.

        Raises:
            ConfigurationError: the checkpoint gets hardly any right.
        """
        for _ in range(MAX_SENTENCES):
            text = corpus.made_sentence(self.rng)
            try:
                spoken = self.speaker.speak(text, draw_manner(self.rng, (voice,)))
            except SynthesisError:
                continue
            audio = np.pad(spoken.samples, (4800, 4800)).astype(np.float32) / np.float32(32768)
            if len(text.split()) > 3 and self.heard_right(Example(audio, [(0.0, 0.0, text)])):
                return spoken
        raise ConfigurationError(
            f"the checkpoint hears none of {MAX_SENTENCES} sentences right: train it longer"
        )

    def recording(self, seconds: float, voice: str) -> Recording:
        """A recording of about `seconds`; it is heard right if `MAX_ROUNDS` suffice."""
        spoken, gaps, length = [], [], 0.5
        while length < 0.98 * seconds:
            sentence, gap = self.sentence(voice), self.rng.randint(20, 60)
            longer = length + (len(sentence.sounds) + gap) * FRAME_S
            if longer > 1.12 * seconds:
                continue
            spoken.append(sentence)
            gaps.append(gap)
            length = longer
        noise = self.noise.standard_normal(round(2 * seconds * SAMPLE_RATE), np.float32)
        for _ in range(MAX_ROUNDS):
            recording = lay_out(spoken, gaps, noise)
            wrong = self.served_wrong(recording)
            if not wrong:
                break
            i = self.rng.choice(wrong)
            others = [self.sentence(voice) for _ in range(4)]
            n_frames = len(spoken[i].sounds)  # the recording keeps its length, nearly
            spoken[i] = min(others, key=lambda other: abs(len(other.sounds) - n_frames))
        return recording


def lay_out(spoken: list[Spoken], gaps: list[int], noise: npt.NDArray[np.float32]) -> Recording:
    """Sentences one after the other with the given pauses behind them, 0.5 s of lead."""
    starts, at = [], 25
    for sentence, gap in zip(spoken, gaps, strict=True):
        starts.append(at)
        at += len(sentence.sounds) + gap
    return Recording(spoken, starts, noise)


def write(recording: Recording, base: Path) -> None:
    """Write the .flac, the .txt and the .json."""
    audio = recording.audio()
    soundfile.write(base.with_suffix(".flac"), to_pcm(audio), SAMPLE_RATE, subtype="PCM_16")
    base.with_suffix(".txt").write_text(recording.text + "\n")
    sentences = [
        {
            "text": spoken.text,
            "start": round((start + EDGE_FRAMES) * FRAME_S, 2),
            "end": round((recording.end(i) - EDGE_FRAMES) * FRAME_S, 2),
        }
        for i, (spoken, start) in enumerate(zip(recording.spoken, recording.starts, strict=True))
    ]
    meta = {
        "duration": round(len(audio) / SAMPLE_RATE, 2),
        "voice": recording.spoken[0].voice,
        "sentences": sentences,
    }
    base.with_suffix(".json").write_text(json.dumps(meta, indent=2) + "\n")


def make(checkpoint: Path, out: Path, console: Console, seed: str = "1") -> None:
    """Make every recording, and say of each whether the checkpoint hears it right."""
    out.mkdir(parents=True, exist_ok=True)
    for name, seconds, voice in RECORDINGS:
        maker = SampleMaker(checkpoint, f"{seed}/{name}")
        recording = maker.recording(seconds, voice)
        write(recording, out / name)
        right = not maker.served_wrong(recording)
        console.print(
            f"{name}: {len(recording.spoken)} sentences, "
            f"{len(recording.audio()) / SAMPLE_RATE:.1f} s, {'right' if right else 'NOT right'}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path, default=SAMPLES)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make(arguments.checkpoint, arguments.out, Console(), arguments.seed)


if __name__ == "__main__":
    main()
