"""Train the small network of speaker embeddings that ships beside the demo checkpoint.

    python -m cluster.demo.recipe.speakers [--speakers 1500] [--steps 2700]

Writes ONNX to --out, in the form of published networks: features [batch, frames, 80] in, vectors
[batch, 128] out. It is trained on synthetic voices only; `benchmark.accuracy.speakers` measures it
on other ones. A speaker is a random variant of an espeak-ng voice or a voice of flite. Pitch and
rate change with each utterance, so that they do not identify the speaker.
"""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from scipy.signal import fftconvolve
from torch import Tensor, nn

from benchmark.shared.command import make_parser
from benchmark.shared.speech import corpus
from benchmark.shared.speech.synthesis import Manner, RefusedError, speak
from cluster.common.messages import SAMPLE_RATE
from router.audio.embedding import FRAMES, fbank

ESPEAK_DATA = Path("/usr/lib/x86_64-linux-gnu/espeak-ng-data")
ACCENTS = ("en-us", "en-us-nyc", "en", "en-gb-x-rp", "en-gb-scotland", "en-029")
FOREIGN = ("de", "fr", "es", "it", "nl", "pl", "pt", "sv")  # languages whose voices read English
FLITE = ("awb", "kal16")  # slt and rms are kept for measuring
UTTERANCES = 7
NETWORK = Path(__file__).parents[1] / "speakers.onnx"
BATCH = 128
LR = 2e-3
SCALE, MARGIN = 30.0, 0.2  # of the additive angular margin
EVERY = 100  # steps between printed lines

Features = npt.NDArray[np.float16]  # (n_frames, 80) of all utterances of a speaker


def variant(rng: Random) -> str:
    tract = rng.uniform(0.84, 1.28)
    low = rng.uniform(62, 190)
    tilt = rng.uniform(-0.12, 0.08)
    lines = [
        "language variant",
        f"pitch {low:.0f} {low * rng.uniform(1.2, 1.7):.0f}",
        f"flutter {rng.choice((0, 0, 2, 5, 10, 20))}",
        f"roughness {rng.choice((0, 0, 1, 2, 3, 4))}",
        f"voicing {rng.uniform(60, 160):.0f}",
        f"consonants {rng.uniform(50, 150):.0f} {rng.uniform(60, 150):.0f}",
        f"intonation {rng.choice((1, 1, 2, 3, 4))}",
        "stressAdd " + " ".join(f"{rng.uniform(-30, 70):.0f}" for _ in range(8)),
    ]
    if rng.random() < 0.3:
        lines.append(f"klatt {rng.randint(1, 5)}")
    for i in range(9):
        scale = rng.uniform(0.7, 1.2) if i == 0 else tract * rng.lognormvariate(0, 0.08)
        height = 100 * rng.lognormvariate(0, 0.22) * (1 + tilt * i)
        width = 110 * rng.lognormvariate(0, 0.28)
        shift = rng.uniform(-250, 250) if 0 < i < 3 and rng.random() < 0.15 else 0
        lines.append(f"formant {i} {100 * scale:.0f} {height:.0f} {width:.0f} {shift:.0f}")
    if rng.random() < 0.4:
        lines.append("breath 0 " + " ".join(str(rng.randint(0, 5)) for _ in range(7)))
    if rng.random() < 0.3:
        points = (f"{hz} {rng.randint(70, 255)}" for hz in (150, 600, 1500, 3000, 5000))
        lines.append("tone " + " ".join(points))
    return "\n".join(lines) + "\n"


def own_voices(folder: Path) -> Path:
    """Point espeak-ng at a folder that links its data; return the folder for voice variants."""
    variants = folder / "espeak-ng-data" / "voices" / "!v"
    variants.mkdir(parents=True)
    for path in ESPEAK_DATA.iterdir():
        if path.name != "voices":
            (variants.parents[1] / path.name).symlink_to(path)
    os.environ["ESPEAK_DATA_PATH"] = str(folder)
    return variants


def utterances(variants: Path, rng: Random) -> Iterator[npt.NDArray[np.float32]]:
    """Yield utterances of one new speaker: float32 (n_samples,) in -1..1."""
    if rng.random() < 0.03:
        manner = Manner(rng.choice(FLITE), 0, 0, 1.0, rng.uniform(0.82, 1.25))
    else:
        name = f"v{rng.getrandbits(48):x}"
        (variants / name).write_text(variant(rng))
        language = rng.choice(FOREIGN if rng.random() < 0.2 else ACCENTS)
        manner = Manner(f"{language}+{name}", rng.randint(125, 195), 0, 1.0, 1.0)
    while True:
        said = replace(
            manner,
            pitch=rng.randint(20, 80),
            rate_wpm=round(manner.rate_wpm * rng.uniform(0.88, 1.14)),
            stretch=rng.uniform(0.85, 1.15),
        )
        with suppress(RefusedError):
            spoken = speak(corpus.spoken_sentence(rng), said)
            yield in_a_room(spoken.samples.astype(np.float32) / np.float32(32768), rng)


def in_a_room(audio: npt.NDArray[np.float32], rng: Random) -> npt.NDArray[np.float32]:
    noise = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.6:
        decay_s = rng.uniform(0.08, 0.6)
        n = int(decay_s * SAMPLE_RATE)
        tail = noise.standard_normal(n) * np.exp(-6.9 * np.arange(n) / n)
        tail *= rng.uniform(0.05, 0.7) / np.sqrt((tail**2).sum())
        tail[0] = 1.0
        audio = fftconvolve(audio, tail)[: len(audio)]
    level = 10 ** (rng.uniform(-80, -40) / 20)
    noisy = audio * 10 ** (rng.uniform(-15, 3) / 20) + level * noise.standard_normal(len(audio))
    return noisy.astype(np.float32)


def heard_of(speaker: int, variants: Path) -> Features:
    said = islice(utterances(variants, Random(f"speakers/{speaker}")), UTTERANCES)
    return np.concatenate([fbank(audio * 32768).astype(np.float16) for audio in said])


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
    def __init__(self, heard: Sequence[Features]) -> None:
        ends = np.cumsum([0] + [len(features) for features in heard])
        self.features = np.concatenate(heard)
        self.bounds = np.stack((ends[:-1], ends[1:]), axis=1)
        self.rng = np.random.default_rng(0)

    def draw(self, speakers: npt.NDArray[np.int64]) -> Tensor:
        """One window of each speaker: float32 (n_speakers, FRAMES, 80), of mean 0."""
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


def train(heard: Sequence[Features], steps: int, console: Console) -> Network:
    """Minimize an additive angular margin loss over speakers."""
    torch.manual_seed(0)
    network = Network()
    directions = nn.Parameter(torch.randn(len(heard), 128))
    optimizer = torch.optim.AdamW([*network.parameters(), directions], lr=LR, weight_decay=1e-3)
    crops, loss_sum = Crops(heard), 0.0
    for step in range(steps):
        done = step / steps
        rate = LR * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * done))
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
    names: dict[str, Any] = {"input_names": ["feats"], "output_names": ["embs"]}
    axes = {"feats": {0: "batch", 1: "frames"}, "embs": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old exporter is deprecated but needs only onnx
        torch.onnx.export(
            network.eval(), (torch.zeros(2, FRAMES, 80),), path,
            dynamo=False, dynamic_axes=axes, **names,
        )  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=NETWORK)
    parser.add_argument("--speakers", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=2700, help="about 15 minutes on one idle core")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    speakers = track(range(asked.speakers), description="speaking", console=console)
    with TemporaryDirectory() as folder:
        variants = own_voices(Path(folder))
        heard = [heard_of(speaker, variants) for speaker in speakers]
    export(train(heard, asked.steps, console), asked.out)
    console.print(f"wrote {asked.out}: {asked.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
