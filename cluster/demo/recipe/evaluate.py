"""Measure a demo checkpoint on new speech, in the served shape: every window padded to 30 s.

    python -m cluster.demo.recipe.evaluate [--checkpoint DIR] [--state FILE] [--json FILE]

The sets are from a seed that training never used: made sentences, words in free order, both by
voices that training never heard, sentences of shapes that the corpus cannot make (`shapes.txt`),
windows of 20 to 30 s with several sentences, and windows without speech. Word error rates are on
normalised text: lowercase, no punctuation. Each set is decoded greedily by the model alone, with
timestamps and without, and then as it is served: through audio workers, encoder and decoder, with
the server's defaults. Segment times are the served ones. --state keeps each set once it is done,
and a later run with the same checkpoint and scale goes on there.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.demo.recipe.alone import LoneModel
from cluster.demo.recipe.examples import Example, ExampleMaker, make_sets
from cluster.demo.recipe.export import CHECKPOINT
from cluster.demo.recipe.scores import Score
from cluster.demo.recipe.speech import corpus
from cluster.demo.recipe.speech.wav import to_pcm, wav_bytes
from cluster.settings_sources import load_settings

Sets = dict[str, list[Example]]


def score(model: LoneModel, examples: list[Example], timestamps: bool) -> Score:
    """What the model alone makes of a set."""
    found = Score()
    texts = model.transcribe([example.audio for example in examples], timestamps)
    for example, text in zip(examples, texts, strict=True):
        found.add(example, text)
    return found


def score_served(checkpoint: Path, sets: Sets, on_window: Callable[[], None]) -> dict[str, Score]:
    """Send every window as a file through the whole path."""
    from cluster.demo.recipe.served import transcribe_served  # Ray's and the router's imports
    from router.api.params import TranscriptionParams

    named = [(name, example) for name, examples in sets.items() for example in examples]
    settings = load_settings(None, {"model": str(checkpoint)}, environ={})
    files = [wav_bytes(to_pcm(example.audio)) for _, example in named]
    params = TranscriptionParams(model="demo", seed=0)
    heard = transcribe_served(settings, params, files, on_window)
    scores = {name: Score() for name in sets}
    for (name, example), transcript in zip(named, heard, strict=True):
        spans = [(segment.start, segment.end) for segment in transcript.segments]
        scores[name].add(example, transcript.text, spans)
    return scores


def quick_sets(n: int = 24) -> Sets:
    """A few windows, to look at while a model is trained."""
    maker = ExampleMaker("quick")
    return {
        "made": [maker.alone(corpus.made_sentence) for _ in range(n)],
        "free": [maker.alone(corpus.free_order) for _ in range(n)],
        "long": [maker.several(corpus.sentence) for _ in range(n // 4)],
    }


def quick_check(checkpoint: Path, sets: Sets) -> str:
    """One line per set, for the log of a training."""
    model = LoneModel(checkpoint)
    lines = []
    for name, examples in sets.items():
        timed, plain = score(model, examples, True), score(model, examples, False)
        wrong = "".join(f"\n    said {a}\n    got  {b}" for a, b in timed.wrong[:2])
        rates = f"WER {timed.errors.wer:.1f} %, plain {plain.errors.wer:.1f} %"
        lines.append(f"check {name}: {rates}{wrong}")
    return "\n".join(lines)


def evaluate(
    checkpoint: Path, scale: float, console: Console, state: Path | None = None
) -> dict[str, dict[str, float]]:
    """Measure every set that `state` does not hold yet, print the table, and return it."""
    rows = KeptRows(state, {"checkpoint": digest_of(checkpoint), "scale": scale})
    with Progress(console=console, transient=True) as bar:
        making = bar.add_task("speaking", total=None)
        sets = make_sets(scale)
        bar.remove_task(making)
        task = bar.add_task("windows", total=sum(map(len, sets.values())))
        model: LoneModel | None = None
        for name, examples in sets.items():
            bar.update(task, description=name)
            if name not in rows.by_set:
                model = model or LoneModel(checkpoint)
                timed, plain = score(model, examples, True), score(model, examples, False)
                served = score_served(checkpoint, {name: examples}, lambda: bar.advance(task))
                rows.add(name, _row(timed, plain, served[name]))
            else:
                bar.advance(task, len(examples))
    results = {name: rows.by_set[name] for name in sets}
    console.print(_table(results))
    return results


def digest_of(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's weights and of what it declares, in hexadecimal digits."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")) + sorted(checkpoint.glob("*.json")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class KeptRows:
    """Rows of sets that are done, in a JSON file; the file also says what they are rows of."""

    def __init__(self, file: Path | None, measured: dict[str, Any]) -> None:
        """Raises SystemExit where the file holds another checkpoint's rows or another scale's."""
        self._file = file
        self._measured = measured
        self.by_set: dict[str, dict[str, float]] = {}
        if file is not None and file.is_file():
            content = json.loads(file.read_text())
            if content["measured"] != measured:
                raise SystemExit(f"{file} is of {content['measured']}: name another file")
            self.by_set = content["sets"]

    def add(self, name: str, row: dict[str, float]) -> None:
        """Keep a set's row, at once."""
        self.by_set[name] = row
        if self._file is not None:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(json.dumps({"measured": self._measured, "sets": self.by_set}))
            part.replace(self._file)


def _row(timed: Score, plain: Score, served: Score) -> dict[str, float]:
    return {
        "windows": served.windows,
        "words": served.errors.words,
        "wer_timestamps": round(timed.errors.wer, 2),
        "wer_plain": round(plain.errors.wer, 2),
        "wer_served": round(served.errors.wer, 2),
        "answered": timed.answered,
        "answered_served": served.answered,
        "matched": served.matched,
        "median_start_gap_s": round(median(served.start_gaps_s or [0.0]), 3),
        "median_end_gap_s": round(median(served.end_gaps_s or [0.0]), 3),
    }


def _table(results: dict[str, dict[str, float]]) -> Table:
    """Word error rates in percent; gaps over windows that have as many segments as sentences."""
    columns = ("set", "windows", "timestamps", "none", "served", "segments right", "start", "end")
    table = Table(*columns, title="Word error rate; segment start and end, median distance")
    for name, row in results.items():
        if not row["words"]:
            answered = (
                f"{row['answered']:.0f} answered",
                "",
                f"{row['answered_served']:.0f} answered",
            )
            table.add_row(name, f"{row['windows']:.0f}", *answered, "", "", "")
            continue
        rates = (f"{row[key]:.1f} %" for key in ("wer_timestamps", "wer_plain", "wer_served"))
        gaps = (f"{row[key]:.2f} s" for key in ("median_start_gap_s", "median_end_gap_s"))
        table.add_row(name, f"{row['windows']:.0f}", *rates, f"{row['matched']:.0f}", *gaps)
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller sets")
    parser.add_argument("--state", type=Path, metavar="FILE", help="keep what is done, and go on")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = evaluate(arguments.checkpoint, arguments.scale, Console(), arguments.state)
    line = json.dumps(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    main()
