"""Measure a demo checkpoint on new speech, in the served shape: every window padded to 30 s.

    python -m cluster.demo.recipe.evaluate [--checkpoint DIR] [--scale 1.0] [--json FILE]

The sets are from a seed that training never used: made sentences, words in free order, both by
voices that training never heard, sentences of shapes that the corpus cannot make (`shapes.txt`),
windows of 20 to 30 s with several sentences, and windows without speech. Word error rates are on
normalised text: lowercase, no punctuation. Each set is decoded greedily by the model alone, by
transformers, with timestamps and without, and then as it is served: through audio workers, encoder
and decoder, with the server's defaults. Segment times are the served ones.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.synthesis import UNHEARD_VOICES
from benchmark.shared.speech.wav import to_pcm, wav_bytes
from benchmark.shared.word_errors import WordErrors, count_errors
from cluster.common.messages import SAMPLE_RATE
from cluster.common.settings_sources import load_settings
from cluster.demo.recipe.train import CHECKPOINT
from cluster.demo.samples import words_of
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.interface import RequestContext
from router.transcript import Transcript

SHAPES = Path(__file__).parent / "shapes.txt"
BATCH = 8
AT_ONCE = 4  # files in flight
NO_DEADLINE_S = 24 * 3600.0


@dataclass(slots=True)
class Score:
    """answered: windows whose text is not empty; matched: windows with as many segments as there
    were sentences; gaps_s: distances of their starts and of their ends from the true ones.
    """

    errors: WordErrors = field(default_factory=WordErrors)
    answered: int = 0
    matched: int = 0
    gaps_s: list[tuple[float, float]] = field(default_factory=list)

    def add(self, example: Example, heard: Transcript | str) -> None:
        text = heard if isinstance(heard, str) else heard.text
        self.errors += errors_of(example.text, text)
        self.answered += bool(words_of(text))
        segments = () if isinstance(heard, str) else heard.segments
        if segments and len(segments) == len(example.segments):
            self.matched += 1
            for one, (start, end, _) in zip(segments, example.segments, strict=True):
                self.gaps_s.append((abs(one.start - start), abs(one.end - end)))


def errors_of(said: str, heard: str) -> WordErrors:
    return count_errors(" ".join(words_of(said)), " ".join(words_of(heard)))


def score(examples: Sequence[Example], heard: Iterable[Transcript | str]) -> Score:
    found = Score()
    for example, one in zip(examples, heard, strict=True):
        found.add(example, one)
    return found


class LoneModel:
    """A checkpoint by transformers, in float32, greedily: its figures do not depend on ours."""

    def __init__(self, checkpoint: Path) -> None:
        model: Any = WhisperForConditionalGeneration
        self._model = model.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(checkpoint)
        self._tokenizer: Any = WhisperTokenizer.from_pretrained(checkpoint)

    @torch.inference_mode()
    def transcribe(self, examples: Sequence[Example], timestamps: bool) -> list[str]:
        texts: list[str] = []
        for i in range(0, len(examples), BATCH):
            audio = [example.audio for example in examples[i : i + BATCH]]
            mel = self._extract(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows = self._model.generate(
                mel.input_features,
                language="en",
                task="transcribe",
                return_timestamps=timestamps,
                max_new_tokens=220,
            )
            texts += self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def hear_served(checkpoint: Path, examples: Sequence[Example]) -> list[Transcript]:
    """Windows through the whole served path in this process, by the server's defaults."""
    settings = load_settings(None, {"model": str(checkpoint)}, environ={})
    params = TranscriptionParams(model="demo", seed=0)

    async def hear_all() -> list[Transcript]:
        slots = asyncio.Semaphore(AT_ONCE)
        async with local_transcriber(settings) as transcriber:

            async def hear(example: Example, file: Path) -> Transcript:
                async with slots:
                    content = wav_bytes(to_pcm(example.audio))
                    await asyncio.to_thread(file.write_bytes, content)
                    context = RequestContext.unlimited(file.name, NO_DEADLINE_S)
                    return (await transcriber.transcribe(file, params, context)).transcript

            with tempfile.TemporaryDirectory(prefix="splitscribe-demo-") as folder:
                paths = [Path(folder) / str(index) for index in range(len(examples))]
                return await asyncio.gather(*map(hear, examples, paths))

    return asyncio.run(hear_all())


def make_sets(scale: float = 1.0) -> dict[str, list[Example]]:
    n, few = (max(1, round(count * scale)) for count in (500, 100))
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


def evaluate(checkpoint: Path, scale: float, console: Console) -> dict[str, dict[str, float]]:
    """Word error rates in percent; gaps over windows that have as many segments as sentences."""
    model = LoneModel(checkpoint)
    results = {}
    for name, examples in track(make_sets(scale).items(), "measuring", console=console):
        timed = score(examples, model.transcribe(examples, True))
        plain = score(examples, model.transcribe(examples, False))
        served = score(examples, hear_served(checkpoint, examples))
        results[name] = {"windows": len(examples), **_row(timed, plain, served)}
    console.print(_table(results))
    return results


def _row(timed: Score, plain: Score, served: Score) -> dict[str, float]:
    start_gaps_s, end_gaps_s = np.array(served.gaps_s or [(0.0, 0.0)]).T.tolist()
    return {
        "words": served.errors.words,
        "wer_timestamps": round(timed.errors.wer, 2),
        "wer_plain": round(plain.errors.wer, 2),
        "wer_served": round(served.errors.wer, 2),
        "answered": timed.answered,
        "answered_served": served.answered,
        "matched": served.matched,
        "median_start_gap_s": round(median(start_gaps_s), 3),
        "median_end_gap_s": round(median(end_gaps_s), 3),
    }


def _table(results: dict[str, dict[str, float]]) -> Table:
    names = list(next(iter(results.values())))
    table = Table("set", *(name.replace("_", " ") for name in names))
    for name, row in results.items():
        table.add_row(name, *(f"{row[column]:g}" for column in names))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller sets")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    results = evaluate(arguments.checkpoint, arguments.scale, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
