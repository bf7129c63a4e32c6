"""Train the demo checkpoint: short windows first, the full 30 s shape more and more, resumable.

    python -m cluster.demo.recipe.train --work DIR --minutes 110

Reads the speech store in DIR/speech (see `speech_store`), keeps its state in DIR/state.pt, and
continues from there. The schedule runs over the minutes given; a later run with --again starts a
new one, with a warm restart of the learning rate, from the weights that exist. `trainer` holds the
update itself, `tune_context` the last stage.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar

from cluster.demo.recipe.evaluate import Sets, quick_check, quick_sets
from cluster.demo.recipe.export import export
from cluster.demo.recipe.trainer import FROM_NOTHING, Progress, Trainer, copy_tokenizer
from cluster.demo.recipe.windows import WindowMaker, WindowShape

SHORT = WindowShape(frames=300, batch=16)
MEDIUM = WindowShape(frames=600, batch=8)
FULL = WindowShape(frames=1500, batch=4)
LONE = WindowShape(frames=1500, batch=4, lone=True)
# Shares of the steps at the start, the middle and the end of a schedule.
MIXES: tuple[tuple[float, dict[WindowShape, float]], ...] = (
    (0.0, {SHORT: 0.96, MEDIUM: 0.04, FULL: 0.0, LONE: 0.0}),
    (0.3, {SHORT: 0.70, MEDIUM: 0.16, FULL: 0.10, LONE: 0.04}),
    (0.6, {SHORT: 0.34, MEDIUM: 0.20, FULL: 0.36, LONE: 0.10}),
    (1.0, {SHORT: 0.20, MEDIUM: 0.12, FULL: 0.48, LONE: 0.20}),
)
PEAK_LR = 2e-3
MINUTES = 180.0  # on two cores of their own
SAVE_EVERY_S = 60
MIX_FROM_AGAIN = 0.6  # a schedule on old weights is mostly in the full shape at once
RESCAN_EVERY = 200  # steps
DrawShape = Callable[[Random, float], WindowShape]  # from the share of the schedule that is over


def mix(done: float) -> dict[WindowShape, float]:
    """Shares of the window shapes when `done` of the schedule is over."""
    for (left, first), (right, second) in pairwise(MIXES):
        if done <= right:
            weight = (done - left) / (right - left)
            return {s: (1 - weight) * first[s] + weight * second[s] for s in first}
    return MIXES[-1][1]


def mixed_shapes(mix_from: float) -> DrawShape:
    """Shapes by the mixes of a schedule that begins at `mix_from`."""

    def draw(rng: Random, done: float) -> WindowShape:
        shares = mix(mix_from + (1 - mix_from) * done)
        return rng.choices(list(shares), list(shares.values()))[0]

    return draw


def train(trainer: Trainer, draw: DrawShape, console: Console, check_every_s: float) -> None:
    """Run the schedule to its end, saving and checking as it goes, behind a progress bar."""
    with ProgressBar(console=console) as bar:
        task = bar.add_task("training", total=trainer.progress.total_s)
        for elapsed_s in _run(trainer, draw, console, check_every_s):
            bar.update(task, completed=elapsed_s)
    trainer.save()


def _run(
    trainer: Trainer, draw: DrawShape, console: Console, check_every_s: float
) -> Iterator[float]:
    """Step until the time is over; yields the seconds done."""
    progress = trainer.progress
    maker = WindowMaker(trainer.store, trainer.tokens, f"train/{progress.step}")
    check_sets: Sets = {}
    saved = checked = time.monotonic()
    sums: dict[str, float] = {}
    by_shape: dict[str, list[float]] = {}
    n_logged = 0
    began = time.monotonic()
    while progress.elapsed_s < progress.total_s:
        start = time.monotonic()
        if progress.step % RESCAN_EVERY == 0:
            trainer.store.rescan()
        shape = draw(maker.rng, progress.elapsed_s / progress.total_s)
        losses = trainer.step(maker.batch(shape))
        by_shape.setdefault(shape.label, []).append(losses["token"])
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value
        n_logged += 1
        if progress.step % 50 == 0:
            text = " ".join(f"{name} {value / n_logged:.3f}" for name, value in sums.items())
            text += "; token by frames" + "".join(
                f" {label} {sum(v) / len(v):.2f}" for label, v in sorted(by_shape.items())
            )
            by_shape.clear()
            pace = (time.monotonic() - began) / n_logged
            console.print(
                f"step {progress.step} {progress.elapsed_s / 60:.1f} min of "
                f"{progress.total_s / 60:.0f}: {text}, {pace:.2f} s/step",
                highlight=False,
            )
            sums, n_logged, began = {}, 0, time.monotonic()
        progress.elapsed_s += time.monotonic() - start
        if time.monotonic() - saved > SAVE_EVERY_S:
            trainer.save()
            saved = time.monotonic()
        if time.monotonic() - checked > check_every_s:
            trainer.save()
            export(trainer.work, trainer.work / "check")
            check_sets = check_sets or quick_sets()
            console.print(quick_check(trainer.work / "check", check_sets), highlight=False)
            checked = began = time.monotonic()
        yield progress.elapsed_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run is asked for.

    again: a new schedule on the weights of an earlier one. start_from: without a state, the
    checkpoint whose tokenizer and weights are the start.
    """

    minutes: float
    lr: float
    dropout: float
    again: bool
    start_from: Path | None

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """The flags that `of` reads."""
        parser.add_argument("--minutes", type=float, default=MINUTES)
        parser.add_argument("--lr", type=float, default=PEAK_LR)
        parser.add_argument("--dropout", type=float, default=0.0)
        parser.add_argument("--again", action="store_true", help="a new schedule on old weights")
        parser.add_argument("--start-from", type=Path, help="a checkpoint, where there is no state")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Schedule":
        """What the flags say."""
        return cls(
            arguments.minutes,
            arguments.lr,
            arguments.dropout,
            arguments.again,
            arguments.start_from,
        )


def resume_or_start(work: Path, schedule: Schedule) -> Trainer:
    """A trainer with the state of `work`, if there is one, and the time of `schedule`."""
    has_state = (work / "state.pt").exists()
    start_from = None if has_state else schedule.start_from
    if start_from is not None:
        copy_tokenizer(start_from, work)
    trainer = Trainer(work, work / "speech", schedule.lr, schedule.dropout, FROM_NOTHING)
    if has_state:
        trainer.load()
    elif start_from is not None:
        trainer.warm_start(start_from / "model.safetensors")
    if schedule.again or start_from is not None:
        trainer.progress = Progress(step=trainer.progress.step, mix_from=MIX_FROM_AGAIN)
    trainer.progress.total_s = 60 * schedule.minutes
    return trainer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of speech and state")
    Schedule.add_flags(parser)
    parser.add_argument("--check-minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(soft_wrap=True)
    trainer = resume_or_start(arguments.work, Schedule.of(arguments))
    console.print(
        f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(trainer.store)} utterances, step {trainer.progress.step}"
    )
    draw = mixed_shapes(trainer.progress.mix_from)
    train(trainer, draw, console, 60 * arguments.check_minutes)


if __name__ == "__main__":
    main()
