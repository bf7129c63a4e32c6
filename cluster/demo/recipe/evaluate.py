"""Measure a demo checkpoint on new speech, in the served shape: every window padded to 30 s.

    python -m cluster.demo.recipe.evaluate [--checkpoint DIR] [--json FILE]

Sets from a seed that training never used: made sentences, words in free order, both by voices that
training never heard, sentences of shapes that the corpus cannot make (`shapes.txt`), windows of 20
to 30 s with several sentences, and windows without speech. Word error rates are on normalised text:
lowercase, no punctuation. Each set is decoded greedily by the model alone, with timestamps and
without, and then as it is served: through audio workers, encoder and decoder, with the server's
defaults. Segment times are the served ones.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file

from cluster.demo.recipe import corpus
from cluster.demo.recipe.examples import Example, ExampleMaker, make_sets
from cluster.demo.recipe.greedy import listen, transcribe
from cluster.demo.recipe.mel import N_SAMPLES, log_mel, normalize
from cluster.demo.recipe.scores import Score
from cluster.demo.recipe.text_tokens import TextTokens
from cluster.demo.recipe.whisper import Shape, Whisper

CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
BATCH = 8


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
                total.add(example, heard.text)
    return scores


def score_served(
    checkpoint: Path, sets: dict[str, list[Example]], on_window: Callable[[], None]
) -> dict[str, Score]:
    """Send every window as a file through the whole path."""
    from cluster.demo.recipe.served import transcribe_served  # Ray's and the router's imports

    named = [(name, example) for name, examples in sets.items() for example in examples]
    heard = transcribe_served(checkpoint, [example.audio for _, example in named], on_window)
    scores = {name: Score() for name in sets}
    for (name, example), transcript in zip(named, heard, strict=True):
        spans = [(segment.start, segment.end) for segment in transcript.segments]
        scores[name].add(example, transcript.text, spans)
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
    with Progress(console=console, transient=True) as bar:
        making = bar.add_task("speaking", total=None)
        sets = make_sets(scale)
        bar.remove_task(making)
        n_windows = sum(len(examples) for examples in sets.values())
        task = bar.add_task("the model alone", total=len(sets))
        alone: dict[str, tuple[Score, Score]] = {}
        for name, examples in sets.items():
            alone[name] = score(model, tokens, examples)
            bar.advance(task)
        task = bar.add_task("as it is served", total=n_windows)
        served = score_served(checkpoint, sets, lambda: bar.advance(task))
    results = {name: _row(*alone[name], served[name]) for name in sets}
    console.print(_table(results))
    return results


def _row(timed: Score, plain: Score, served: Score) -> dict[str, float]:
    return {
        "windows": served.windows,
        "words": served.words,
        "wer_timestamps": round(timed.wer, 2),
        "wer_plain": round(plain.wer, 2),
        "wer_served": round(served.wer, 2),
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
