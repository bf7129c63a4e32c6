"""What cross-attention KV of fewer bits costs: errors of logits and of words.

Weights and everything else in float32, so that all that differs is the KV in its pages. Logits: the
reference text is fed once over each clip's KV, and each token's logits are compared with those of
float32. Words: every clip goes through the whole path, greedily, with `kv_dtype` set; its errors
are compared clip by clip with float32's; the gate is 0.3 points for float8, 0.1 for the others.

    python -m benchmark.accuracy.kv_dtype [--demo N] [--threads 0] [--save FILE]

Clips are those of `benchmark.accuracy.wer`; without a flag the recordings of the package. Prints
the sizes first, then the table, one JSON line last; ends with status 1 when the gate fails.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmark.accuracy.compared import COLUMNS, cells, clips_parser, compare
from benchmark.accuracy.forced_text import ForcedText
from benchmark.shared.clips import clips_of
from benchmark.shared.command import print_result
from benchmark.shared.word_errors import WordErrors, count_all, total
from cluster.demo.recipe.evaluate import transcribe_served
from cluster.kv.cross_kv import CrossKVProjection
from cluster.kv.layout import window_bytes
from cluster.kv.layout_for import served_kv_layout
from cluster.kv.pool import PagePool
from cluster.messages import WINDOW_SAMPLES
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import use_threads
from cluster.model.kv_scales import kv_scales
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.settings import Settings
from cluster.settings_sources import load_settings
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.model import TorchDecoder
from decoder_worker.model_runner import self_kv_layout
from decoder_worker.tensors import DecoderTensors
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from router.api.params import TranscriptionParams

REFERENCE = "float32"
DTYPES = (REFERENCE, "bfloat16", "float16", "float8")
GATES = {"float8": 0.3}  # points of word error rate above the reference's
GATE = 0.1
PARAMS = TranscriptionParams(model="demo", language="en", seed=0, fallback=False)


@dataclass
class LogitErrors:
    """Of one dtype against the reference, over all tokens of all clips."""

    n_tokens: int = 0
    n_same_best: int = 0
    largest: float = 0.0
    square: float = 0.0  # sums over tokens of the mean over the vocabulary
    reference_square: float = 0.0  # the same, of the reference about its mean
    divergence: float = 0.0  # of Kullback and Leibler, in nats

    def add(self, logits: Tensor, expected: Tensor) -> None:
        """Both float32 [n_tokens, n_vocab]."""
        gap = logits - expected
        self.n_tokens += len(gap)
        self.n_same_best += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        self.largest = max(self.largest, gap.abs().max().item())
        self.square += gap.square().mean(-1).sum().item()
        self.reference_square += expected.var(-1).sum().item()
        log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
        self.divergence += (log_p.exp() * (log_p - log_q)).sum().item()

    def as_json(self) -> dict[str, float]:
        return {
            "largest": round(self.largest, 5),
            "relative": round((self.square / self.reference_square) ** 0.5, 7),
            "divergence": round(self.divergence / self.n_tokens, 9),
            "same_best": round(self.n_same_best / self.n_tokens, 5),
        }


@dataclass
class Row:
    """One dtype's figures."""

    window_bytes: int
    logits: LogitErrors = field(default_factory=LogitErrors)
    errors: list[WordErrors] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Forcing:
    """Feeds a given text over a clip's KV, held in a pool of each dtype."""

    def __init__(self, settings: dict[str, Settings]) -> None:
        checkpoint = open_checkpoint("demo")
        self._tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self._mel = LogMel(checkpoint.dims.n_mels)
        self._encoder = AudioEncoder(checkpoint)
        self._n_text_ctx = checkpoint.dims.n_text_ctx
        self._self_pool = PagePool(self_kv_layout(checkpoint, "float32"), 1)
        self._cross_pools = {
            name: PagePool(served_kv_layout(checkpoint, one, "cpu"), 1)
            for name, one in settings.items()
        }
        self._projections, self._decoders = {}, {}
        for name, pool in self._cross_pools.items():
            scales = kv_scales(checkpoint, pool.tensor.dtype)
            tensors = DecoderTensors.load(checkpoint, torch.float32, "cpu", scales=scales)
            attention = TorchAttention(self._self_pool.tensor, pool.tensor)
            self._projections[name] = CrossKVProjection(checkpoint, scales=scales)
            self._decoders[name] = TorchDecoder.of(tensors, attention)

    @torch.inference_mode()
    def logits(self, pcm: NDArray[np.int16], reference: str) -> dict[str, Tensor]:
        """By dtype: float32 [n_tokens, n_vocab], of the tokens of `reference` and of its end."""
        states = self._encoder(self._mel([pcm]))
        text = ForcedText(self._tokenizer, reference, self._n_text_ctx)
        found = {}
        for name, pool in self._cross_pools.items():
            self._projections[name].write(states, pool.tensor, [(0,)])
            decoder = self._decoders[name]
            found[name] = text.logits(decoder, 0, self._self_pool.layout, pool.layout)
        return found


def settings_of(kv_dtype: str, threads: int) -> Settings:
    role = {"device": "cpu", "dtype": "float32", "threads": threads}
    flags = {"kv_dtype": kv_dtype, "encoder": role, "decoder": role}
    return load_settings(None, {**flags, "router": {"audio_workers": 1}}, environ={})


def passes(name: str, points: float) -> bool:
    return points <= GATES.get(name, GATE)


def report(rows: dict[str, Row]) -> dict[str, Any]:
    reference = rows[REFERENCE]
    by_dtype = {}
    for name, row in rows.items():
        compared = compare(row.texts, row.errors, reference.texts, reference.errors)
        by_dtype[name] = {
            "mb": round(row.window_bytes / 1e6, 3),
            "logits": row.logits.as_json(),
            **compared,
            "passed": passes(name, compared["points"][0]),
        }
    return {
        "model": "demo",
        "clips": len(reference.texts),
        "words": total(reference.errors).words,
        "tokens": reference.logits.n_tokens,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "dtypes": by_dtype,
    }


def print_table(made: dict[str, Any]) -> None:
    columns = ("KV", "logits, rms", "largest", "KL, nats", "same best", *COLUMNS)
    table = Table(*columns, title="Cross-attention KV of fewer bits, the rest in float32")
    for name, row in made["dtypes"].items():
        logits = row["logits"]
        table.add_row(
            name,
            f"{logits['relative']:.1e}",
            f"{logits['largest']:.4f}",
            f"{logits['divergence']:.1e}",
            f"{100 * logits['same_best']:.2f} %",
            *cells(row, made["clips"]),
        )
    Console(width=120).print(table)


def main() -> int:
    args = clips_parser(__doc__).parse_args()
    clips = [clip for clip in clips_of(args) if clip.reference]
    use_threads(args.threads)
    settings = {name: settings_of(name, args.threads) for name in DTYPES}
    checkpoint = open_checkpoint("demo", weights=False)
    rows = {
        name: Row(window_bytes(served_kv_layout(checkpoint, one, "cpu")))
        for name, one in settings.items()
    }
    sizes = ", ".join(f"{name} {row.window_bytes / 1e6:.2f} MB" for name, row in rows.items())
    print(f"One window: {sizes}. {len(clips)} clips.", flush=True)

    forcing = Forcing(settings)
    for clip in clips:
        pcm = clip.pcm()
        if len(pcm) > WINDOW_SAMPLES:
            continue  # its text is that of several windows
        logits = forcing.logits(pcm, clip.reference or "")
        for name, row in rows.items():
            row.logits.add(logits[name], logits[REFERENCE])
    files = [clip.read() for clip in clips]
    for name, row in rows.items():
        heard = transcribe_served(settings[name], PARAMS, files)
        row.texts = [transcript.text for transcript in heard]
        row.errors = count_all([clip.reference or "" for clip in clips], row.texts, "en")
        print(f"transcribed with {name}", file=sys.stderr, flush=True)
    made = report(rows)
    print_table(made)
    print_result("kv_dtype", made, args.save)
    return 0 if all(row["passed"] for row in made["dtypes"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
