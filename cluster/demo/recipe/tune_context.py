"""The last stage: make a checkpoint indifferent to how much padding its encoder sees. Resumable.

    python -m cluster.demo.recipe.tune_context --work DIR [--start-from CHECKPOINT] [--out DIR]

A Whisper that only ever saw 30 s invents text where the encoder sees a shorter context. Here every
second window is a context as short as its content, with a random slack of digital silence behind
it, at the frame's beginning; the others are full, so that nothing is forgotten. Small steps of
AdamW from good weights; the two heads on the encoder are not needed any more.

Reads DIR/speech (made where it is missing), keeps its state in DIR/context and writes the tuned
checkpoint, which declares its context in a file of its own, to --out (default: DIR/tuned).
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console

from cluster.demo.recipe.export import CHECKPOINT, export
from cluster.demo.recipe.speech.store import make_store
from cluster.demo.recipe.train import FULL, LONE, train
from cluster.demo.recipe.trainer import Method, Trainer, adamw, copy_tokenizer
from cluster.demo.recipe.windows import TRIMMED_LONG, WindowShape
from cluster.model.encoder_context import FILE

METHOD = Method(adamw, {"token": 1.0, "guide": 0.3}, warmup_steps=100)
SHORTEST = 100  # steps of the shortest context
LONGEST = 1500
SLACK = 192  # up to so many steps behind the content: 64, and what rounding up may add
STEPS_A_BATCH = 4800  # of encoder context: a batch costs about the same at any length
LARGEST_BATCH = 24
SHARES = {"short": 0.35, "long": 0.30, "full": 0.25, "lone": 0.10}
MINUTES = 40.0  # on two cores of their own
LR = 2e-4
DECLARED = {"slack": 64, "max_content_s": 30.0}


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a run is asked for; `out` is where the tuned checkpoint goes."""

    work: Path
    start_from: Path
    out: Path
    minutes: float
    lr: float = LR


def draw_shape(rng: Random, _done: float) -> WindowShape:
    """Contexts of random length, and full ones, in the same shares all the time."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if kind in ("full", "lone"):
        return FULL if kind == "full" else LONE
    is_short = kind == "short"
    limits = (SHORTEST, TRIMMED_LONG - 1) if is_short else (TRIMMED_LONG, LONGEST)
    frames = rng.randint(*limits)
    batch = min(LARGEST_BATCH, max(4, STEPS_A_BATCH // frames))
    return WindowShape(frames, batch, lone=is_short and rng.random() < 0.7, slack=SLACK)


def resume_or_start(tuning: Tuning) -> Trainer:
    """The state of an earlier run, or the weights to start from."""
    work = tuning.work / "context"
    copy_tokenizer(tuning.start_from, work)
    trainer = Trainer(work, tuning.work / "speech", tuning.lr, 0.0, METHOD)
    if trainer.state_path.exists():
        trainer.load()
    else:
        trainer.warm_start(tuning.start_from / "model.safetensors")
    trainer.progress.total_s = 60 * tuning.minutes
    return trainer


def tune(tuning: Tuning, console: Console, check_every_s: float) -> Path:
    """Run to the end of the schedule and write the checkpoint; returns the weights' path."""
    trainer = resume_or_start(tuning)
    console.print(f"{len(trainer.store)} utterances, step {trainer.progress.step}")
    train(trainer, draw_shape, console, check_every_s)
    path = export(trainer.work, tuning.out)
    (tuning.out / FILE).write_text(json.dumps(DECLARED) + "\n")
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of speech and state")
    parser.add_argument("--start-from", type=Path, default=CHECKPOINT, help="default: the bundled")
    parser.add_argument("--out", type=Path, help="default: DIR/tuned")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--shards", type=int, default=16, help="of 2,000 utterances")
    parser.add_argument("--seed", type=int, default=2, help="of the speech")
    parser.add_argument("--check-minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(soft_wrap=True)
    work = arguments.work
    make_store(work / "speech", arguments.shards, arguments.seed, arguments.threads)
    out = arguments.out or work / "tuned"
    tuning = Tuning(work, arguments.start_from, out, arguments.minutes, arguments.lr)
    console.print(f"wrote {tune(tuning, console, 60 * arguments.check_minutes)}")


if __name__ == "__main__":
    main()
