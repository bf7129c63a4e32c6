"""Measure a demo checkpoint on new speech, in the served shape: every window padded to 30 s.

    python -m cluster.demo.evaluate [--checkpoint DIR] [--json FILE]

Six sets from a seed that training never used: made sentences, words in free order, both by voices
that training never heard, sentences of shapes that the corpus cannot make (`shapes.txt`), windows
of 20 to 30 s with several sentences, and windows without speech. Word error rates are on normalised
text: lowercase, no punctuation. Each set is decoded with timestamps and without.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file

from cluster.demo import corpus
from cluster.demo.decode import Heard, listen, transcribe
from cluster.demo.mel import N_SAMPLES, SAMPLE_RATE, log_mel, normalize
from cluster.demo.synthesis import (
    EDGE_FRAMES,
    ESPEAK_VOICES,
    FLITE_VOICES,
    FRAME_S,
    FRAME_SAMPLES,
    UNHEARD_VOICES,
    Spoken,
    SynthesisError,
    Synthesizer,
    draw_manner,
)
from cluster.demo.text_tokens import TextTokens
from cluster.demo.whisper import Shape, Whisper

SEED = "evaluation"
CHECKPOINT = Path(__file__).parent / "checkpoint"
SHAPES = Path(__file__).parent / "shapes.txt"
BATCH = 8
TextSource = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Example:
    """One window: its audio (float32, up to 30 s) and what is said when, in s."""

    audio: npt.NDArray[np.float32]
    segments: list[tuple[float, float, str]]

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(text for _, _, text in self.segments)


@dataclass(slots=True)
class Score:
    """Errors over one set."""

    errors: int = 0
    words: int = 0
    windows: int = 0
    exact: int = 0
    answered: int = 0  # windows whose text is not empty
    start_gaps_s: list[float] = field(default_factory=list)
    end_gaps_s: list[float] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def wer(self) -> float:
        """Word errors in percent of the words said."""
        return 100 * self.errors / max(1, self.words)

    def add(self, example: Example, heard: Heard) -> None:
        """Count one window."""
        errors, words = error_counts(example.text, heard.text)
        self.errors += errors
        self.words += words
        self.windows += 1
        self.exact += errors == 0
        self.answered += bool(words_of(heard.text))
        if errors:
            self.wrong.append((example.text, heard.text))
        for start, end, _ in heard.segments if example.segments else ():
            self.start_gaps_s.append(min(abs(start - s) for s, _, _ in example.segments))
            self.end_gaps_s.append(min(abs(end - e) for _, e, _ in example.segments))


def words_of(text: str) -> list[str]:
    """Normalised: lowercase, no punctuation."""
    return "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()


def error_counts(reference: str, heard: str) -> tuple[int, int]:
    """Word errors (Levenshtein) and words of the reference."""
    said, got = words_of(reference), words_of(heard)
    row = list(range(len(got) + 1))
    for i, word in enumerate(said, start=1):
        last, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1], len(said)


class ExampleMaker:
    """New windows by the recipe: voices, gain, silence and noise as training has them."""

    def __init__(self, seed: str) -> None:
        self.rng = Random(f"{SEED}/{seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(64))
        self.speaker = Synthesizer()

    def speak(self, source: TextSource, voices: tuple[str, ...] | None = None) -> Spoken:
        """One new utterance; half by flite unless `voices` says otherwise."""
        rng = self.rng
        text = source(rng)
        while True:
            heard = voices or (FLITE_VOICES if rng.random() < 0.5 else ESPEAK_VOICES)
            try:
                return self.speaker.speak(text, draw_manner(rng, heard))
            except SynthesisError:
                continue

    def alone(self, source: TextSource, voices: tuple[str, ...] | None = None) -> Example:
        """One utterance after 0 to 0.9 s of silence."""
        lead = self.rng.randint(0, 45)
        return self._finish([(lead, self.speak(source, voices))])

    def several(self, source: TextSource, gaps_s: tuple[float, float] = (0.1, 0.9)) -> Example:
        """As many utterances as 20 to 30 s hold."""
        rng = self.rng
        limit = rng.randint(1000, 1500)
        at = rng.randint(0, 20)
        placed: list[tuple[int, Spoken]] = []
        while True:
            spoken = self.speak(source)
            if at + len(spoken.sounds) > limit:
                return self._finish(placed)
            placed.append((at, spoken))
            at += len(spoken.sounds) + round(rng.uniform(*gaps_s) / FRAME_S)

    def empty(self) -> Example:
        """Silence or noise alone."""
        audio = np.zeros(self.rng.randint(2, 30) * SAMPLE_RATE, np.float32)
        if self.rng.random() < 0.7:
            level = 10 ** (self.rng.uniform(-80, -20) / 20)
            audio += level * self.noise.standard_normal(len(audio), np.float32)
        return Example(audio, [])

    def _finish(self, placed: list[tuple[int, Spoken]]) -> Example:
        rng = self.rng
        last = max(at + len(spoken.sounds) for at, spoken in placed)
        n_samples = min(N_SAMPLES, last * FRAME_SAMPLES + rng.randint(0, SAMPLE_RATE))
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


def make_sets(scale: float = 1.0) -> dict[str, list[Example]]:
    """The evaluation's sets; `scale` below 1 makes smaller ones for a quick look."""
    n = max(1, round(500 * scale))
    few = max(1, round(100 * scale))
    shapes = SHAPES.read_text().splitlines()
    made, free = ExampleMaker("made"), ExampleMaker("free")
    unheard, other = ExampleMaker("unheard"), ExampleMaker("shapes")
    several, empty = ExampleMaker("several"), ExampleMaker("empty")
    sets = {
        "made sentences": [made.alone(corpus.made_sentence) for _ in range(n)],
        "free order": [free.alone(corpus.free_order) for _ in range(n)],
    }
    for voice in UNHEARD_VOICES:
        for name, source in (("made", corpus.made_sentence), ("free", corpus.free_order)):
            sets[f"unheard {voice}, {name}"] = [unheard.alone(source, (voice,)) for _ in range(few)]
    sets["other shapes"] = [
        other.alone(lambda _, text=text: text)  # type: ignore[misc]
        for text in shapes[: max(1, round(len(shapes) * scale))]
    ]
    sets["20 to 30 s"] = [several.several(corpus.sentence) for _ in range(few)]
    sets["no speech"] = [empty.empty() for _ in range(few)]
    return sets


def features(examples: list[Example]) -> torch.Tensor:
    """Padded log-mel as served, float32 (n, 80, 3000)."""
    audio = torch.zeros(len(examples), N_SAMPLES)
    for row, example in zip(audio, examples, strict=True):
        row[: len(example.audio)] = torch.from_numpy(example.audio)
    return normalize(log_mel(audio))


def score(model: Whisper, tokens: TextTokens, examples: list[Example]) -> tuple[Score, Score]:
    """Decode a set with timestamps and without, and count."""
    scores = Score(), Score()
    for i in range(0, len(examples), BATCH):
        part = examples[i : i + BATCH]
        cross = listen(model, features(part))
        for total, timed in zip(scores, (True, False), strict=True):
            for example, heard in zip(part, transcribe(model, tokens, cross, timed), strict=True):
                total.add(example, heard)
    return scores


def load_checkpoint(folder: Path) -> tuple[Whisper, TextTokens]:
    """The shipped files as this package's own model."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab_size=config["vocab_size"],
        d_model=config["d_model"],
        n_heads=config["encoder_attention_heads"],
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        n_mels=config["num_mel_bins"],
    )
    model = Whisper(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval(), TextTokens(folder)


_quick_sets: dict[str, list[Example]] = {}


def quick_check(model: Whisper, tokens: TextTokens, n: int = 24) -> str:
    """One line per set on a few windows, for the log of a training."""
    if not _quick_sets:
        maker = ExampleMaker("quick")
        _quick_sets["made"] = [maker.alone(corpus.made_sentence) for _ in range(n)]
        _quick_sets["free"] = [maker.alone(corpus.free_order) for _ in range(n)]
        _quick_sets["long"] = [maker.several(corpus.sentence) for _ in range(n // 4)]
    lines = []
    for name, examples in _quick_sets.items():
        timed, plain = score(model, tokens, examples)
        example = "".join(f"\n    said {a}\n    got  {b}" for a, b in timed.wrong[:2])
        lines.append(f"check {name}: WER {timed.wer:.1f} %, plain {plain.wer:.1f} %{example}")
    return "\n".join(lines)


def evaluate(checkpoint: Path, scale: float, console: Console) -> dict[str, dict[str, float]]:
    """Measure everything, print the table, and return it."""
    model, tokens = load_checkpoint(checkpoint)
    sets = make_sets(scale)
    table = Table("set", "windows", "WER, timestamps", "WER, none", "exact", "start gap", "end gap")
    results: dict[str, dict[str, float]] = {}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("transcribing", total=len(sets))
        for name, examples in sets.items():
            timed, plain = score(model, tokens, examples)
            bar.advance(task)
            row = {
                "windows": timed.windows,
                "wer_timestamps": round(timed.wer, 2),
                "wer_plain": round(plain.wer, 2),
                "exact": timed.exact,
                "answered": timed.answered,
                "median_start_gap_s": round(median(timed.start_gaps_s or [0.0]), 3),
                "median_end_gap_s": round(median(timed.end_gaps_s or [0.0]), 3),
            }
            results[name] = row
            if not any(example.segments for example in examples):
                table.add_row(
                    name, str(timed.windows), f"{timed.answered} answered", "", "", "", ""
                )
                continue
            table.add_row(
                name,
                str(timed.windows),
                f"{timed.wer:.1f} %",
                f"{plain.wer:.1f} %",
                str(timed.exact),
                f"{row['median_start_gap_s']:.2f} s",
                f"{row['median_end_gap_s']:.2f} s",
            )
    console.print(table)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller sets")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = evaluate(arguments.checkpoint, arguments.scale, Console())
    line = json.dumps(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    main()
