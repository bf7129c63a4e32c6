"""Train the demo checkpoint: short windows first, the full 30 s shape more and more, resumable.

    python -m cluster.demo.recipe.train --work DIR --minutes 110

Reads the speech store in DIR/speech (see `speech_store`), keeps its state in DIR/state.pt, and
continues from there. The schedule runs over the minutes given; a later run with --again starts a
new one, with a warm restart of the learning rate, from the weights that exist.

Three losses beside the tokens' teach what Whisper learns from 680,000 hours: the encoder must say
at each step which sound and which word is spoken, and the guided heads must look where the next
token is heard. Without them a small decoder learns the language first and listens late.
"""

import argparse
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress as ProgressBar
from safetensors.torch import load_file
from torch import Tensor

from cluster.demo.recipe import lexicon
from cluster.demo.recipe.evaluate import quick_check, quick_sets
from cluster.demo.recipe.export import export
from cluster.demo.recipe.speech_store import SpeechStore
from cluster.demo.recipe.text_tokens import TextTokens, train_tokenizer
from cluster.demo.recipe.whisper import ALIGNMENT_HEADS, AuxiliaryHeads, Shape, Whisper
from cluster.demo.recipe.windows import IGNORED, Batch, WindowMaker, WindowShape

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
WARMUP_STEPS = 300
SAVE_EVERY_S = 150
MIX_FROM_AGAIN = 0.6  # a schedule on old weights is mostly in the full shape at once
RESCAN_EVERY = 200  # steps


@dataclass(slots=True)
class Progress:
    """How far a schedule is; kept with the weights."""

    step: int = 0
    elapsed_s: float = 0.0
    total_s: float = 0.0
    mix_from: float = 0.0  # where in MIXES the schedule begins


class Trainer:
    """Weights, their averages and the optimizer, with one step over a batch."""

    def __init__(self, work: Path, lr: float, dropout: float) -> None:
        self.work = work
        if not (work / "tokenizer" / "tokenizer.json").exists():
            train_tokenizer(work / "tokenizer")
        self.tokens = TextTokens(work / "tokenizer")
        self.store = SpeechStore(work / "speech")
        torch.manual_seed(0)
        self.model = Whisper(Shape(vocab_size=self.tokens.n_vocab))
        n_words = len(lexicon.all_words()) + 1
        self.heads = AuxiliaryHeads(self.model.shape.d_model, len(self.store.sounds), n_words)
        self.average = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.parameters = [
            p for p in (*self.model.parameters(), *self.heads.parameters()) if p.requires_grad
        ]
        # Muon is for the matrices between layers, not for embeddings and last heads. Scaled so, it
        # serves at AdamW's rates: after 300 steps of one run each, 4.33 nats a token at 2e-3, where
        # AdamW had 4.76 at 1.5e-3.
        linears = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        hidden = [p for m in linears for p in (m.weight,) if isinstance(p, torch.nn.Parameter)]
        others = [p for p in self.parameters if not any(p is h for h in hidden)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.lr = lr
        self.dropout = dropout
        self.progress = Progress()

    def learning_rate(self) -> float:
        """Warm-up by steps, then a cosine to nothing over the time given."""
        done = min(1.0, self.progress.elapsed_s / self.progress.total_s)
        warm = min(1.0, (self.progress.step + 1) / WARMUP_STEPS)
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * done))

    def step(self, batch: Batch) -> dict[str, float]:
        """One update; returns the losses."""
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
        losses = self.losses(batch)
        total = losses["token"] + 0.3 * losses["guide"]
        total = total + 0.3 * losses["sound"] + 0.5 * losses["word"]
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if torch.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        self.progress.step += 1
        decay = min(0.999, (1 + self.progress.step) / (20 + self.progress.step))
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                self.average[name].lerp_(value, 1 - decay)
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The tokens' cross-entropy, the guided heads', and those of the encoder's two heads."""
        with torch.autocast("cpu", torch.bfloat16):
            audio = self.model.encoder(batch.mel, batch.offsets, self.dropout)
            cross = self.model.decoder.project(audio)
            hidden, attention = self.model.decoder(batch.tokens, cross, self.dropout)
            scored = batch.targets != IGNORED
            logits = self.model.decoder.logits(hidden[scored])
            sounds, words = self.heads.sound(audio), self.heads.word(audio)
        banded = batch.bands.any(dim=-1)
        missed = []
        for layer, head in ALIGNMENT_HEADS:
            rows = attention[layer - 1][:, head][banded]  # the first layer has none
            inside = rows.masked_fill(~batch.bands[banded], -torch.inf)
            missed.append(-inside.logsumexp(dim=-1).mean())
        return {
            "token": F.cross_entropy(logits.float(), batch.targets[scored]),
            "guide": torch.stack(missed).mean() if banded.any() else logits.sum() * 0.0,
            "sound": F.cross_entropy(sounds.float().flatten(0, 1), batch.sounds.flatten()),
            "word": F.cross_entropy(words.float().flatten(0, 1), batch.words.flatten()),
        }

    @property
    def state_path(self) -> Path:
        """Where the run is kept."""
        return self.work / "state.pt"

    def save(self) -> None:
        """Write the state beside the old one, then take its place."""
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "shape": self.model.shape.as_dict(),
            "step": self.progress.step,
            "elapsed_s": self.progress.elapsed_s,
            "total_s": self.progress.total_s,
            "mix_from": self.progress.mix_from,
        }
        part = self.state_path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.state_path)

    def load(self) -> None:
        """Continue from a saved state."""
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.average = state["average"]
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        times = (state["elapsed_s"], state["total_s"], state.get("mix_from", 0.0))
        self.progress = Progress(state["step"], *times)

    def warm_start(self, weights: Path) -> None:
        """Begin with the weights of a checkpoint; heads and optimizers begin anew."""
        kept = {name: value.float() for name, value in load_file(weights).items()}
        self.model.load_state_dict(kept)
        self.average = {k: v.clone() for k, v in self.model.state_dict().items()}


def mix(done: float) -> dict[WindowShape, float]:
    """Shares of the window shapes when `done` of the schedule is over."""
    for (left, first), (right, second) in pairwise(MIXES):
        if done <= right:
            weight = (done - left) / (right - left)
            return {s: (1 - weight) * first[s] + weight * second[s] for s in first}
    return MIXES[-1][1]


def train(trainer: Trainer, console: Console, check_every_s: float) -> None:
    """Run the schedule to its end, saving and checking as it goes, behind a progress bar."""
    with ProgressBar(console=console) as bar:
        task = bar.add_task("training", total=trainer.progress.total_s)
        for elapsed_s in _run(trainer, console, check_every_s):
            bar.update(task, completed=elapsed_s)
    trainer.save()


def _run(trainer: Trainer, console: Console, check_every_s: float) -> Iterator[float]:
    """Step until the time is over; yields the seconds done."""
    progress = trainer.progress
    maker = WindowMaker(trainer.store, trainer.tokens, f"train/{progress.step}")
    check_sets = quick_sets()
    saved = checked = time.monotonic()
    sums: dict[str, float] = {}
    by_shape: dict[WindowShape, list[float]] = {}
    n_logged = 0
    began = time.monotonic()
    while progress.elapsed_s < progress.total_s:
        start = time.monotonic()
        if progress.step % RESCAN_EVERY == 0:
            trainer.store.rescan()
        done = progress.elapsed_s / progress.total_s
        shares = mix(progress.mix_from + (1 - progress.mix_from) * done)
        shape = maker.rng.choices(list(shares), list(shares.values()))[0]
        losses = trainer.step(maker.batch(shape))
        by_shape.setdefault(shape, []).append(losses["token"])
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value
        n_logged += 1
        if progress.step % 50 == 0:
            text = " ".join(f"{name} {value / n_logged:.3f}" for name, value in sums.items())
            text += "; token by frames" + "".join(
                f" {s.frames}{' lone' if s.lone else ''} {sum(v) / len(v):.2f}"
                for s, v in by_shape.items()
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
    if start_from is not None:  # ids of the weights' own vocabulary
        (work / "tokenizer").mkdir(parents=True, exist_ok=True)
        for file in start_from.glob("tokenizer*.json"):
            shutil.copy(file, work / "tokenizer" / file.name)
    trainer = Trainer(work, schedule.lr, schedule.dropout)
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
    train(trainer, console, 60 * arguments.check_minutes)


if __name__ == "__main__":
    main()
