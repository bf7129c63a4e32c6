"""The whole recipe of the bundled checkpoint in one command: speech, training, recordings.

    python -m cluster.demo.recipe --work DIR [--steps 7750] [--tune-steps 840] [--shards 20]

Each step takes up what an earlier run left in DIR: finished shards of speech, the state of either
training. Either keeps the checkpoint as it is by then in a folder of its own, which
`cluster.demo.recipe.evaluate` takes. With --out the last one, and recordings that suit it, are
written there instead of here. Needs espeak-ng and flite; without a change of seed it speaks the
same sentences again. --steps 0 does the last stage alone, the tuning to shorter contexts.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from cluster.common.model.encoder_context import FILE
from cluster.demo.recipe import samples
from cluster.demo.recipe.store import SHARD_SIZE, make_store
from cluster.demo.recipe.train import CHECKPOINT, CONTEXT, FROM_NOTHING, Schedule, Trainer

DECLARED = {"slack": 64, "max_content_s": 30.0}  # what the last stage makes true


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and states")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--shard-size", type=int, default=SHARD_SIZE, help="utterances in each")
    parser.add_argument("--seed", type=int, default=1, help="of the speech")
    parser.add_argument("--steps", type=int, default=7_750, help="about 3 hours on two cores")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tune-steps", type=int, default=840, help="about 40 minutes")
    parser.add_argument("--tune-lr", type=float, default=2e-4)
    asked = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    quiet: Any = logging
    quiet.disable_progress_bar()  # of files that are loaded and saved
    speech = asked.work / "speech"
    make_store(speech, asked.shards, asked.seed, cores, asked.shard_size)
    start = None if asked.steps else CHECKPOINT
    if asked.steps:
        schedule = Schedule(asked.steps, asked.lr)
        trainer = Trainer(asked.work / "weights", speech, FROM_NOTHING, schedule, start)
        trainer.run(console)
        start = trainer.checkpoint
    tuning = Schedule(asked.tune_steps, asked.tune_lr)
    tuned = Trainer(asked.work / "context", speech, CONTEXT, tuning, start)
    tuned.run(console)
    shutil.copytree(tuned.checkpoint, asked.out, dirs_exist_ok=True)
    (asked.out / FILE).write_text(json.dumps(DECLARED) + "\n")
    console.print(f"wrote {asked.out}")
    is_bundled = asked.out.resolve() == CHECKPOINT.resolve()
    samples.make(asked.out, samples.SAMPLES if is_bundled else asked.out / "samples", console)


if __name__ == "__main__":
    main()
