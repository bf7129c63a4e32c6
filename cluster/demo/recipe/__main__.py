"""The whole recipe of the bundled checkpoint in one command: speech, training, export, recordings.

    python -m cluster.demo.recipe --work DIR [--minutes 180] [--shards 20]

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
from cluster.demo.recipe.speech_store import make_store
from cluster.demo.recipe.train import Schedule, resume_or_start, train


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and state")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--shards", type=int, default=20, help="of 2,000 utterances")
    parser.add_argument("--seed", type=int, default=1)
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    make_store(arguments.work / "speech", arguments.shards, arguments.seed, cores)
    trainer = resume_or_start(arguments.work, Schedule.of(arguments))
    train(trainer, console, check_every_s=900)
    console.print(f"wrote {export(arguments.work, arguments.out)}")
    is_bundled = arguments.out.resolve() == CHECKPOINT.resolve()
    samples = make_samples.SAMPLES if is_bundled else arguments.out / "samples"
    make_samples.make(arguments.out, samples, console)


if __name__ == "__main__":
    main()
