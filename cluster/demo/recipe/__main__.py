"""The whole recipe of the bundled checkpoint in one command: speech, training, export, recordings.

    python -m cluster.demo.recipe --work DIR [--minutes 180] [--tune-minutes 40] [--shards 20]

The last part of the training is `cluster.demo.recipe.tune_context`, which is a command of its own
for a checkpoint that exists.
Each step takes up what an earlier run left in DIR: finished shards of speech, the training's state.
With --out the checkpoint, and recordings that suit it, are written there instead of here.
Needs espeak-ng and flite; without a change of seed it speaks the same sentences again.
"""

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console

from cluster.demo.recipe import make_samples
from cluster.demo.recipe.export import CHECKPOINT, export
from cluster.demo.recipe.speech.store import make_store
from cluster.demo.recipe.train import Schedule, mixed_shapes, resume_or_start, train
from cluster.demo.recipe.tune_context import MINUTES, Tuning, tune

CHECK_EVERY_S = 900.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and state")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--shards", type=int, default=20, help="of 2,000 utterances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tune-minutes", type=float, default=MINUTES)
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    make_store(arguments.work / "speech", arguments.shards, arguments.seed, cores)
    trainer = resume_or_start(arguments.work, Schedule.of(arguments))
    train(trainer, mixed_shapes(trainer.progress.mix_from), console, CHECK_EVERY_S)
    untuned = arguments.work / "untuned"
    export(arguments.work, untuned)
    tuning = Tuning(arguments.work, untuned, arguments.out, arguments.tune_minutes)
    console.print(f"wrote {tune(tuning, console, CHECK_EVERY_S)}")
    is_bundled = arguments.out.resolve() == CHECKPOINT.resolve()
    samples = make_samples.SAMPLES if is_bundled else arguments.out / "samples"
    make_samples.make(arguments.out, samples, console)


if __name__ == "__main__":
    main()
