"""The demo checkpoint while it is trained: weights, averages, optimizers, one update over a batch.

Three losses beside the tokens' teach what Whisper learns from 680,000 hours: the encoder must say
at each step which sound and which word is spoken, and the guided heads must look where the next
token is heard. Without them a small decoder learns the language first and listens late.

Knows neither which windows come when (`train`, `tune_context`) nor how they are made (`windows`).
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cluster.demo.recipe.speech import lexicon
from cluster.demo.recipe.speech.store import SpeechStore
from cluster.demo.recipe.text_tokens import TextTokens, train_tokenizer
from cluster.demo.recipe.whisper import ALIGNMENT_HEADS, AuxiliaryHeads, Shape, Whisper
from cluster.demo.recipe.windows import IGNORED, Batch

Optimizers = list[torch.optim.Optimizer]


@dataclass(slots=True)
class Progress:
    """How far a schedule is; kept with the weights."""

    step: int = 0
    elapsed_s: float = 0.0
    total_s: float = 0.0
    mix_from: float = 0.0  # where in the mixes of `train` the schedule begins


def muon_and_adamw(model: Whisper, heads: AuxiliaryHeads, lr: float) -> Optimizers:
    """From nothing: Muon for the matrices between layers, AdamW for embeddings and last heads.

    Muon is scaled so that it serves at AdamW's rates: after 300 steps of one run each, 4.33 nats a
    token at 2e-3, where AdamW had 4.76 at 1.5e-3.
    """
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    hidden = [p for m in linears for p in (m.weight,) if isinstance(p, torch.nn.Parameter)]
    others = [
        p
        for p in (*model.parameters(), *heads.parameters())
        if p.requires_grad and not any(p is h for h in hidden)
    ]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def adamw(model: Whisper, heads: AuxiliaryHeads, lr: float) -> Optimizers:
    """For weights that are good already: small steps only, of everything."""
    parameters = [p for p in (*model.parameters(), *heads.parameters()) if p.requires_grad]
    return [torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]


@dataclass(frozen=True, slots=True)
class Method:
    """How the weights are changed: the optimizers, the share of each loss, the steps of warm-up.

    A loss without a share is not counted; `token` is that of the text.
    """

    optimizers: Callable[[Whisper, AuxiliaryHeads, float], Optimizers]
    shares: Mapping[str, float]
    warmup_steps: int


FROM_NOTHING = Method(
    muon_and_adamw, {"token": 1.0, "guide": 0.3, "sound": 0.3, "word": 0.5}, warmup_steps=300
)


class Trainer:
    """Weights, their averages and the optimizers, with one step over a batch."""

    def __init__(self, work: Path, speech: Path, lr: float, dropout: float, method: Method) -> None:
        self.work = work
        if not (work / "tokenizer" / "tokenizer.json").exists():
            train_tokenizer(work / "tokenizer")
        self.tokens = TextTokens(work / "tokenizer")
        self.store = SpeechStore(speech)
        torch.manual_seed(0)
        self.model = Whisper(Shape(vocab_size=self.tokens.n_vocab))
        n_words = len(lexicon.all_words()) + 1
        self.heads = AuxiliaryHeads(self.model.shape.d_model, len(self.store.sounds), n_words)
        self.average = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.parameters = [
            p for p in (*self.model.parameters(), *self.heads.parameters()) if p.requires_grad
        ]
        self.optimizers = method.optimizers(self.model, self.heads, lr)
        self.lr = lr
        self.dropout = dropout
        self.method = method
        self.progress = Progress()

    def learning_rate(self) -> float:
        """Warm-up by steps, then a cosine to nothing over the time given."""
        done = min(1.0, self.progress.elapsed_s / self.progress.total_s)
        warm = min(1.0, (self.progress.step + 1) / self.method.warmup_steps)
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * done))

    def step(self, batch: Batch) -> dict[str, float]:
        """One update; returns the losses."""
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
        losses = self.losses(batch)
        shares = self.method.shares
        total = torch.stack([share * losses[name] for name, share in shares.items()]).sum()
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
        return {name: float(losses[name].detach()) for name in shares}

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


def copy_tokenizer(checkpoint: Path, work: Path) -> None:
    """Take a checkpoint's tokenizer for `work`: ids of the weights' own vocabulary."""
    (work / "tokenizer").mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, work / "tokenizer" / file.name)
