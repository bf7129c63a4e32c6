"""The whole recipe of the bundled checkpoint in one command: speech and training.

    python -m cluster.demo.recipe --work DIR [--steps 7750] [--tune-steps 840] [--shards 20]

Each step takes up what an earlier run left in DIR: finished shards of speech, the state of either
training. Either keeps the checkpoint as it is by then in a folder of its own, which
`benchmark.accuracy.demo_model` takes. With --out the last one is written there instead of here.
Needs espeak-ng and flite, and speaks the same sentences every time. --steps 0 does the last stage
alone, the tuning to shorter contexts.
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

DECLARED = {"slack": 64, "max_content_s": 30.0}  # what the last stage makes true


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
    quiet.disable_progress_bar()  # of files that are loaded and saved
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
