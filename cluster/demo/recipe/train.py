"""Train the demo checkpoint in two stages, by the model of transformers.

Three losses beside that of the tokens make up for little data: the encoder must name the sound and
the word of each step, and the alignment heads must attend to where the next token is heard. The
second stage, `CONTEXT`, trains on encoder contexts of any length, since a Whisper that only saw 30
s invents text in shorter ones.
"""

import copy
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import WhisperConfig, WhisperForConditionalGeneration

from benchmark.shared.speech import lexicon
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.demo.recipe.store import SpeechStore
from cluster.demo.recipe.windows import IGNORED, Batch, WindowMaker, WindowShape

CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
SETTINGS = (  # files of a checkpoint that training copies
    *("tokenizer.json", "tokenizer_config.json"),
    *("generation_config.json", "preprocessor_config.json"),
)
INIT_STD = 0.04  # about torch's default for this width; Whisper's 0.02 is for larger models
SHORT = WindowShape(frames=300, batch=16)
MEDIUM = WindowShape(frames=600, batch=8)
FULL = WindowShape(frames=1500, batch=4)
LONE = WindowShape(frames=1500, batch=4, lone=True)
# Shares of the steps at these points of a schedule, interpolated between them.
MIXED_AT = (0.0, 0.3, 0.6, 1.0)
MIXES = {
    SHORT: (0.96, 0.70, 0.34, 0.20),
    MEDIUM: (0.04, 0.16, 0.20, 0.12),
    FULL: (0.0, 0.10, 0.36, 0.48),
    LONE: (0.0, 0.04, 0.10, 0.20),
}
SLACK = 192  # most steps behind the content: 64, and those of rounding up
CONTEXTS = {"short": (100, 499), "long": (500, 1500)}  # encoder steps
CONTEXT_SHARES = {"short": 0.35, "long": 0.30, "full": 0.25, "lone": 0.10}
STEPS_A_BATCH = 4800  # of encoder context, so that batches of any length cost about the same
LARGEST_BATCH = 24
SAVE_EVERY = 200  # steps
LOG_EVERY = 50


def mixed_shape(rng: Random, done: float) -> WindowShape:
    return rng.choices(list(MIXES), [np.interp(done, MIXED_AT, mix) for mix in MIXES.values()])[0]


def context_shape(rng: Random, _done: float) -> WindowShape:
    kind = rng.choices(list(CONTEXT_SHARES), list(CONTEXT_SHARES.values()))[0]
    if kind not in CONTEXTS:
        return FULL if kind == "full" else LONE
    frames = rng.randint(*CONTEXTS[kind])
    batch = min(LARGEST_BATCH, max(4, STEPS_A_BATCH // frames))
    return WindowShape(frames, batch, lone=kind == "short" and rng.random() < 0.7, slack=SLACK)


@dataclass(frozen=True, slots=True)
class Stage:
    """losses: the weight of each; others are not trained. muon: Muon instead of AdamW for the
    matrices of the layers, which learns faster from random weights.
    """

    draw: Callable[[Random, float], WindowShape]
    losses: Mapping[str, float]
    steps: int
    lr: float
    warmup_steps: int
    muon: bool


FROM_NOTHING = Stage(
    mixed_shape,
    {"token": 1.0, "guide": 0.3, "sound": 0.3, "word": 0.5},
    steps=7_750,  # about 3 hours on two cores
    lr=2e-3,
    warmup_steps=300,
    muon=True,
)
CONTEXT = Stage(
    context_shape,
    {"token": 1.0, "guide": 0.3},
    steps=840,  # about 40 minutes
    lr=2e-4,
    warmup_steps=100,
    muon=False,
)


class Trainer:
    """Weights, their running average and the optimizers, which are saved to a folder.

    start_from: the first checkpoint where the folder has no state; None: random weights.
    """

    def __init__(self, folder: Path, speech: Path, stage: Stage, start_from: Path | None) -> None:
        self.stage = stage
        folder.mkdir(parents=True, exist_ok=True)
        self.state_path = folder / "state.pt"
        self.checkpoint = folder / "checkpoint"
        self.base = start_from or CHECKPOINT
        base = open_checkpoint(str(self.base), weights=False)
        self.tokenizer = WhisperTokenizer.from_checkpoint(base)
        self.store = SpeechStore(speech)
        torch.manual_seed(0)
        whisper: Any = WhisperForConditionalGeneration
        # Eager attention returns attention weights, and is faster for windows.
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        config = WhisperConfig.from_pretrained(self.base, init_std=INIT_STD)
        self.model = whisper._from_config(config, **options)
        if start_from is not None:  # `from_pretrained` would make positions trainable
            weights = load_file(start_from / "model.safetensors")
            # Not strict, since the output layer shares the embedding.
            self.model.load_state_dict(weights, strict=False)
        width, n_words = self.model.config.d_model, len(lexicon.all_words()) + 1
        self.heads = nn.ModuleDict(
            {"sound": nn.Linear(width, len(self.store.sounds)), "word": nn.Linear(width, n_words)}
        )
        both = (*self.model.parameters(), *self.heads.parameters())
        self.parameters = [p for p in both if p.requires_grad]
        self.optimizers = self._optimizers()
        self.guided: list[tuple[int, int]] = base.generation_config["alignment_heads"]
        self.average: Any = AveragedModel(self.model, multi_avg_fn=self._averaged)
        self.step_number = 0
        named = {type(one).__name__: one for one in self.optimizers}
        self.kept = {"model": self.model, "heads": self.heads, "average": self.average, **named}
        if self.state_path.exists():
            state = torch.load(self.state_path, weights_only=True)
            self.step_number = state["step"]
            for name, one in self.kept.items():
                one.load_state_dict(state[name])

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        lr = self.stage.lr
        layers = [m for m in self.model.model.modules() if isinstance(m, nn.Linear)]
        hidden = [m.weight for m in layers] if self.stage.muon else []
        others = [p for p in self.parameters if not any(p is one for one in hidden)]
        adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        if not hidden:
            return [adamw]
        muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        return [muon, adamw]

    @staticmethod
    def _averaged(average: Sequence[Tensor], current: Sequence[Tensor], n: Tensor | int) -> None:
        decay = min(0.999, (1 + int(n)) / (20 + int(n)))
        torch._foreach_lerp_(list(average), list(current), 1 - decay)

    @property
    def done(self) -> float:
        return min(1.0, self.step_number / self.stage.steps)

    def run(self, console: Console) -> Path:
        """Train to the end of the schedule. Return the folder of the checkpoint."""
        maker = WindowMaker(self.store, self.tokenizer, f"train/{self.step_number}")
        sums: dict[str, float] = {}
        began = time.monotonic()
        while self.done < 1:
            shape = self.stage.draw(maker.rng, self.done)
            for name, value in self.step(maker.batch(shape)).items():
                sums[name] = sums.get(name, 0.0) + value / LOG_EVERY
            if self.step_number % LOG_EVERY == 0:
                told = ", ".join(f"{name} {value:.3f}" for name, value in sums.items())
                pace = f"{(time.monotonic() - began) / LOG_EVERY:.2f} s each"
                console.print(f"step {self.step_number} of {self.stage.steps}: {told}; {pace}")
                sums, began = {}, time.monotonic()
            if self.step_number % SAVE_EVERY == 0:
                self.save()
        self.save()
        return self.checkpoint

    def step(self, batch: Batch) -> dict[str, float]:
        self.model.train()
        warm = min(1.0, (self.step_number + 1) / self.stage.warmup_steps)
        rate = self.stage.lr * warm * 0.5 * (1 + math.cos(math.pi * self.done))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate
        losses = self.losses(batch)
        weighed = [share * losses[name] for name, share in self.stage.losses.items()]
        torch.stack(weighed).sum().backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if torch.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        self.step_number += 1
        self.average.update_parameters(self.model)
        return {name: float(losses[name].detach()) for name in self.stage.losses}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            audio = encode(self.model.model.encoder, batch)
            heard = self.model.model.decoder(
                batch.tokens, encoder_hidden_states=audio, output_attentions=True, use_cache=False
            )
            scored = batch.targets != IGNORED
            logits = self.model.proj_out(heard.last_hidden_state[scored])
            sounds, words = self.heads["sound"](audio), self.heads["word"](audio)
        banded = batch.bands.any(dim=-1)
        missed = []
        for layer, head in self.guided:
            attention = heard.cross_attentions[layer][:, head][banded].float()
            inside = (attention * batch.bands[banded]).sum(dim=-1)
            missed.append(-inside.clamp_min(1e-6).log().mean())
        return {
            "token": F.cross_entropy(logits.float(), batch.targets[scored]),
            "guide": torch.stack(missed).mean() if banded.any() else logits.sum() * 0.0,
            "sound": F.cross_entropy(sounds.float().flatten(0, 1), batch.sounds.flatten()),
            "word": F.cross_entropy(words.float().flatten(0, 1), batch.words.flatten()),
        }

    def save(self) -> None:
        state = {name: one.state_dict() for name, one in self.kept.items()}
        part = self.state_path.with_suffix(".part")
        torch.save({"step": self.step_number, **state}, part)
        part.replace(self.state_path)
        half = copy.deepcopy(self.average.module).to(torch.float16)
        half.save_pretrained(self.checkpoint)
        # It is written readable for its owner only.
        (self.checkpoint / "model.safetensors").chmod(0o644)
        for name in SETTINGS:
            shutil.copyfile(self.base / name, self.checkpoint / name)


def encode(encoder: Any, batch: Batch) -> Tensor:
    """Encode slices shorter than 30 s, which transformers' own forward refuses: (batch, n, d)."""
    x = F.gelu(encoder.conv1(batch.mel))
    x = F.gelu(encoder.conv2(x)).transpose(1, 2)
    steps = batch.offsets[:, None] + torch.arange(x.shape[1])
    x = x + encoder.embed_positions(steps).to(x.dtype)
    for layer in encoder.layers:
        x = layer(x, None)
    out: Tensor = encoder.layer_norm(x)
    return out
