"""Make the bundled checkpoint: synthesize speech and train on it.

    python -m cluster.demo.recipe --work DIR [--steps 7750] [--tune-steps 840] [--shards 20]

A later run continues from finished shards of speech and the states of training in DIR. Both stages
of training also write their checkpoint there, for `benchmark.accuracy.demo_model`. --steps 0 runs
only the last stage, which tunes the checkpoint to shorter contexts. Needs espeak-ng and flite.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from benchmark.shared.command import make_parser
from cluster.common.model.encoder_context import FILE
from cluster.demo.recipe.store import make_store
from cluster.demo.recipe.train import CHECKPOINT, CONTEXT, FROM_NOTHING, Trainer

DECLARED = {"slack": 64, "max_content_s": 30.0}  # contexts that the last stage trains for


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and states")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--steps", type=int, default=FROM_NOTHING.steps)
    parser.add_argument("--tune-steps", type=int, default=CONTEXT.steps)
    asked = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    quiet: Any = logging
    quiet.disable_progress_bar()  # bars for each file that is loaded or saved
    speech = asked.work / "speech"
    make_store(speech, asked.shards, cores)
    start = CHECKPOINT
    if asked.steps:
        stage = replace(FROM_NOTHING, steps=asked.steps)
        start = Trainer(asked.work / "weights", speech, stage, None).run(console)
    tuning = replace(CONTEXT, steps=asked.tune_steps)
    tuned = Trainer(asked.work / "context", speech, tuning, start).run(console)
    shutil.copytree(tuned, asked.out, dirs_exist_ok=True)
    (asked.out / FILE).write_text(json.dumps(DECLARED) + "\n")
    console.print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
