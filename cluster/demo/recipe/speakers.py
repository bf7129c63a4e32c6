"""Trains the small network of speaker embeddings that ships beside the demo checkpoint.

    python -m cluster.demo.recipe.speakers --work DIR [--shards 30] [--steps 2700]

Takes up the shards of voices that an earlier run left in DIR. Writes the network as ONNX to --out,
in the form in which published ones come: features [batch, frames, 80] in, vectors [batch, 128] out.
It has heard synthetic voices alone and knows nothing of people; `benchmark.accuracy.speakers` tells
how well it does with voices that it has not heard.
"""

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from cluster.demo.recipe.voices import SPEAKERS, UTTERANCES, write_shard
from router.audio.embedding import FRAMES

NETWORK = Path(__file__).parents[1] / "speakers.onnx"
BATCH = 128
SCALE, MARGIN = 30.0, 0.2  # of the additive angular margin
EVERY = 100  # steps between two reports


class Network(nn.Module):
    """A time-delay network with pooling over time; about 270,000 weights."""

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            self._layer(80, 96, 5, stride=2, padding=2),
            self._layer(96, 128, 3, stride=2, padding=1),
        )
        self.inner = nn.ModuleList(
            self._layer(128, 128, 3, dilation=dilation, padding=dilation) for dilation in (1, 2)
        )
        self.wide = self._layer(128, 256, 1)
        self.out = nn.Sequential(nn.BatchNorm1d(512), nn.Linear(512, size))

    @staticmethod
    def _layer(n_in: int, n_out: int, kernel: int, **how: Any) -> nn.Sequential:
        convolution = nn.Conv1d(n_in, n_out, kernel, **how)
        return nn.Sequential(convolution, nn.BatchNorm1d(n_out), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        """features: (batch, frames, 80), of mean 0 over the frames. Returns (batch, size)."""
        x = self.frames(features.transpose(1, 2))
        for layer in self.inner:
            x = x + layer(x)
        x = self.wide(x)
        mean = x.mean(2)
        spread = ((x - mean[:, :, None]) ** 2).mean(2).add(1e-4).sqrt()
        out: Tensor = self.out(torch.cat((mean, spread), 1))
        return out


class Crops:
    """Windows of 1.5 s of many speakers, with pauses and noise made afresh."""

    def __init__(self, shards: list[Path]) -> None:
        features, bounds, n = [], [], 0
        for path in shards:
            with np.load(path) as shard:
                features.append(shard["features"])
                starts = shard["starts"][::UTTERANCES] + n
            bounds += list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
            n += len(features[-1])
        self.features = np.concatenate(features)
        self.bounds = np.array(bounds)
        self.rng = np.random.default_rng(0)

    def draw(self, speakers: npt.NDArray[np.int64]) -> Tensor:
        """One window of each speaker: float32 (n, FRAMES, 80), of mean 0."""
        rng = self.rng
        starts, ends = self.bounds[speakers].T
        rows = rng.integers(starts, ends - FRAMES)[:, None] + np.arange(FRAMES)
        x = self.features[rows].astype(np.float32)
        n = len(x)
        silent = x.min((1, 2))
        for i in np.flatnonzero(rng.random(n) < 0.3):
            at, long = rng.integers(FRAMES), rng.integers(5, 40)
            x[i, at : at + long] = silent[i]
        loud = np.quantile(x.mean(2), 0.8, axis=1)
        level = loud - rng.uniform(0, 7, n)  # 0 to 30 dB below the speech
        for i in np.flatnonzero(rng.random(n) < 0.7):
            shape = np.cumsum(rng.normal(0, 0.3, 80))
            noise = rng.standard_normal((FRAMES, 80), np.float32)
            x[i] = np.logaddexp(x[i], 0.7 * noise + (shape - shape.mean() + level[i]).astype("f4"))
        return torch.from_numpy(x - x.mean(1, keepdims=True))


def train(shards: list[Path], steps: int, lr: float, console: Console) -> Network:
    """A network for which each speaker's windows lie near a direction of the speaker's own."""
    torch.manual_seed(0)
    network = Network()
    directions = nn.Parameter(torch.randn(len(shards) * SPEAKERS, 128))
    optimizer = torch.optim.AdamW([*network.parameters(), directions], lr=lr, weight_decay=1e-3)
    crops, loss_sum = Crops(shards), 0.0
    for step in range(steps):
        done = step / steps
        rate = lr * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        speakers = crops.rng.integers(len(directions), size=BATCH)
        cosines = F.normalize(network(crops.draw(speakers))) @ F.normalize(directions).T
        target = torch.from_numpy(speakers)
        own = cosines.gather(1, target[:, None]).clamp(-0.999, 0.999)
        harder = torch.cos(torch.acos(own) + MARGIN * min(1.0, 4 * done))
        loss = F.cross_entropy(SCALE * cosines.scatter(1, target[:, None], harder), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss_sum += float(loss.detach())
        if (step + 1) % EVERY == 0:
            console.print(f"step {step + 1}: loss {loss_sum / EVERY:.3f}")
            loss_sum = 0.0
    return network


def export(network: Network, path: Path) -> None:
    """Write the network as ONNX; batch and frames may have any length."""
    names: dict[str, Any] = {"input_names": ["feats"], "output_names": ["embs"]}
    axes = {"feats": {0: "batch", 1: "frames"}, "embs": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old exporter needs onnx alone
        torch.onnx.export(
            network.eval(), (torch.zeros(2, FRAMES, 80),), path,
            dynamo=False, dynamic_axes=axes, **names,
        )  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for voices")
    parser.add_argument("--out", type=Path, default=NETWORK)
    parser.add_argument("--shards", type=int, default=30, help="of 50 speakers each")
    parser.add_argument("--steps", type=int, default=2700, help="about 15 minutes on one idle core")
    parser.add_argument("--lr", type=float, default=2e-3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    asked.work.mkdir(parents=True, exist_ok=True)
    indices = track(range(asked.shards), description="speaking", console=console)
    shards = [write_shard(asked.work, index) for index in indices]
    export(train(shards, asked.steps, asked.lr, console), asked.out)
    console.print(f"wrote {asked.out}: {asked.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
