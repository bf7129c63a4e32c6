"""Make the recordings that ship with the demo checkpoint: about 5, 25 and 70 s.

    python -m cluster.demo.make_samples [--checkpoint DIR] [--out DIR]

Made sentences from a seed of their own, by voices of the recipe, one voice per recording, with
pauses of 0.4 to 1.2 s. They are chosen: a sentence that the checkpoint does not get right, alone or
in its recording, is replaced by another. Beside each .flac stand its text and, in a .json, the
times of its sentences.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from rich.console import Console

from cluster.demo import corpus
from cluster.demo.decode import listen, transcribe
from cluster.demo.evaluate import CHECKPOINT, Example, error_counts, features, load_checkpoint
from cluster.demo.synthesis import (
    EDGE_FRAMES,
    FRAME_S,
    FRAME_SAMPLES,
    SAMPLE_RATE,
    Spoken,
    SynthesisError,
    Synthesizer,
    draw_manner,
)
from cluster.demo.text_tokens import TextTokens
from cluster.demo.whisper import Whisper

SAMPLES = Path(__file__).parent / "samples"
RECORDINGS = (("short", 5.0, "slt"), ("medium", 25.0, "en-us+f2"), ("long", 70.0, "rms"))
WINDOW_S = 28.0  # what a check hears at once, cut at pauses as a server does
NOISE_DB = -60.0
MAX_ROUNDS = 40


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

    def windows(self) -> list[tuple[Example, list[int]]]:
        """Groups of sentences of at most `WINDOW_S`, each with its audio."""
        groups: list[list[int]] = []
        for i in range(len(self.spoken)):
            if groups and (self.end(i) - self.starts[groups[-1][0]]) * FRAME_S <= WINDOW_S:
                groups[-1].append(i)
            else:
                groups.append([i])
        audio = self.audio()
        result = []
        for group in groups:
            begin = max(0, self.starts[group[0]] - 10) * FRAME_SAMPLES
            end = (self.end(group[-1]) + 10) * FRAME_SAMPLES
            text = " ".join(self.spoken[i].text for i in group)
            result.append((Example(audio[begin:end], [(0.0, 0.0, text)]), group))
        return result


class SampleMaker:
    """Draws sentences that the checkpoint hears right, and lays them out."""

    def __init__(self, model: Whisper, tokens: TextTokens, seed: str) -> None:
        self.model = model
        self.tokens = tokens
        self.rng = Random(f"samples/{seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(64))
        self.speaker = Synthesizer()

    def heard_right(self, example: Example) -> bool:
        """Whether the text comes out without an error, with timestamps and without."""
        cross = listen(self.model, features([example]))
        for timed in (True, False):
            heard = transcribe(self.model, self.tokens, cross, timed)[0]
            if error_counts(example.text, heard.text)[0]:
                return False
        return True

    def sentence(self, voice: str) -> Spoken:
        """A new sentence of the voice that is heard right on its own."""
        while True:
            text = corpus.made_sentence(self.rng)
            try:
                spoken = self.speaker.speak(text, draw_manner(self.rng, (voice,)))
            except SynthesisError:
                continue
            audio = np.pad(spoken.samples, (4800, 4800)).astype(np.float32) / np.float32(32768)
            if len(text.split()) > 3 and self.heard_right(Example(audio, [(0.0, 0.0, text)])):
                return spoken

    def recording(self, seconds: float, voice: str) -> Recording:
        """A recording of about `seconds`; its windows are heard right if `MAX_ROUNDS` suffice."""
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
            wrong = [g for example, g in recording.windows() if not self.heard_right(example)]
            if not wrong:
                break
            i = self.rng.choice(wrong[0])
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
    soundfile.write(
        base.with_suffix(".flac"), (audio * 32767).astype(np.int16), SAMPLE_RATE, subtype="PCM_16"
    )
    base.with_suffix(".txt").write_text(" ".join(s.text for s in recording.spoken) + "\n")
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
    model, tokens = load_checkpoint(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    for name, seconds, voice in RECORDINGS:
        maker = SampleMaker(model, tokens, f"{seed}/{name}")
        recording = maker.recording(seconds, voice)
        write(recording, out / name)
        right = all(maker.heard_right(example) for example, _ in recording.windows())
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
