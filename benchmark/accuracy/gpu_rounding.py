"""What a GPU's bfloat16 rounding costs, emulated on a CPU: errors of probabilities and of words.

Products, attention and KV are in bfloat16 in every row but the first, with sums in float32, as a
GPU makes them. Rows differ in the residual streams, to which every layer adds, and in the logits.
Each clip is encoded, and decoded greedily with Whisper's rules; then the reference text is fed
once, and the log probability of each of its tokens is compared with that of float32.

    python -m benchmark.accuracy.gpu_rounding [--demo N] [--threads 0] [--save FILE]

Clips are those of `benchmark.accuracy.wer`; without a flag the recordings of the package. Prints
the table, one JSON line last.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmark.accuracy.compared import COLUMNS, cells, clips_parser, compare
from benchmark.accuracy.forced_text import ForcedText
from benchmark.shared.clips import clips_of
from benchmark.shared.command import print_result
from benchmark.shared.word_errors import WordErrors, count_all, total
from cluster.kv.cross_kv import CrossKVProjection
from cluster.kv.layout_for import kv_layout
from cluster.kv.pool import PagePool
from cluster.messages import WINDOW_SAMPLES, CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import use_threads
from cluster.model.layers import LayerNorm, Linear, PackedLinear, Projection
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.model.weights import TORCH_DTYPES
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import Decoders
from decoder_worker.model import TorchDecoder, WideHead
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.tensors import DecoderTensors
from encoder_worker.gpu.encoder import Encoder
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder

AT_ONCE = 8  # clips that are decoded in one batch
OPTIONS = DecodeOptions(language="en")

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Rounding:
    """compute: of products; encoder, decoder: of the residual streams; all keys of TORCH_DTYPES."""

    compute: str = "bfloat16"
    encoder: str = "bfloat16"
    decoder: str = "bfloat16"
    logits: str = "float32"


REFERENCE = "float32"
ROUNDINGS = {
    REFERENCE: Rounding("float32", "float32", "float32"),
    "bfloat16 throughout": Rounding(logits="bfloat16"),
    "logits in float32": Rounding(),
    "logits and the decoder's stream": Rounding(decoder="float32"),
    "logits and both streams": Rounding(encoder="float32", decoder="float32"),
}


@dataclass(frozen=True, slots=True)
class Rounded:
    """A product as a GPU makes it: each result is rounded before anything is added to it."""

    linear: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


def rounded(part: Part, stream: torch.dtype) -> Part:
    """The same layers with their norms' stream in that dtype, and products as a GPU has them."""
    if isinstance(part, LayerNorm):
        return replace(part, weight=part.weight.to(stream), bias=part.bias.to(stream))
    if isinstance(part, Linear | PackedLinear):
        return Rounded(part)  # type: ignore[return-value]
    if isinstance(part, tuple | list):
        return type(part)(rounded(one, stream) for one in part)  # type: ignore[return-value]
    if is_dataclass(part) and not isinstance(part, type):
        found = {one.name: rounded(getattr(part, one.name), stream) for one in fields(part)}
        return replace(part, **found)
    return part


@dataclass
class Figures:
    """One rounding's figures; gaps are of log probabilities, over all tokens of all clips."""

    texts: list[str] = field(default_factory=list)
    errors: list[WordErrors] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Hearing:
    """The whole model on this CPU, in one rounding.

    encoder: mel [B, n_mels, T] to states; another that computes the same may take its place.
    """

    encoder: Encoder

    def __init__(self, rounding: Rounding) -> None:
        checkpoint = open_checkpoint("demo")
        compute = TORCH_DTYPES[rounding.compute]
        self._tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self._prompts = PromptBuilder(self._tokenizer, checkpoint.dims)
        self._mel = LogMel(checkpoint.dims.n_mels)
        self._n_text_ctx = checkpoint.dims.n_text_ctx
        encoder = AudioEncoder(checkpoint, compute)
        encoder.layers = rounded(encoder.layers, TORCH_DTYPES[rounding.encoder])
        encoder.norm = rounded(encoder.norm, TORCH_DTYPES[rounding.encoder])
        self.encoder = encoder
        self._projection = CrossKVProjection(checkpoint, compute)
        own = self_kv_layout(checkpoint, rounding.compute)
        cross = kv_layout(checkpoint, 0, rounding.compute)
        self._self_pool, self._cross_pool = PagePool(own, AT_ONCE), PagePool(cross, AT_ONCE)
        pools = (self._self_pool.tensor, self._cross_pool.tensor)
        tensors = DecoderTensors.load(checkpoint, compute, "cpu", compute)
        decoder = TorchDecoder.of(tensors, TorchAttention(*pools))
        head = Linear(tensors.head, None) if rounding.logits != "float32" else None
        self._decoder = rounded(
            replace(decoder, head=head or WideHead(tensors.head)), TORCH_DTYPES[rounding.decoder]
        )
        self._runner = ModelRunner(
            checkpoint,
            self._tokenizer,
            self._cross_pool,
            self._self_pool,
            AT_ONCE,
            Decoders(self._decoder, self._decoder),
        )

    @torch.inference_mode()
    def hear(self, windows: list[NDArray[np.int16]]) -> list[str]:
        """The text of each of at most AT_ONCE windows; their KV stays in the pages."""
        for page, window in enumerate(windows):
            states = self.encoder(self._mel([window]))
            self._projection.write(states, self._cross_pool.tensor, [(page,)])
        sequences = [self._sequence(i) for i in range(len(windows))]
        launched = self._runner.prefill(sequences)
        while True:
            outputs = self._runner.collect(launched)
            for sequence, rows in zip(launched.sequences, outputs, strict=True):
                assert sequence.search is not None
                sequence.search.take(rows)
            going = [s for s in sequences if s.search is not None and not s.search.done]
            if not going:
                break
            launched = self._runner.decode(going)
        found = [s.search.best().tokens for s in sequences if s.search is not None]
        eot = self._prompts.eot
        return [self._tokenizer.decode([t for t in tokens if t < eot]).strip() for tokens in found]

    @torch.inference_mode()
    def logprobs(self, page: int, reference: str) -> list[float]:
        """Of the reference's tokens over the KV in a page, after a start without timestamps."""
        text = ForcedText(self._tokenizer, reference, self._n_text_ctx)
        layouts = (self._self_pool.layout, self._cross_pool.layout)
        logits = text.logits(self._decoder, page, *layouts)[:-1]
        told = torch.tensor(text.tokens)
        found: list[float] = logits.log_softmax(-1).gather(1, told[:, None]).squeeze(1).tolist()
        return found

    def _sequence(self, slot: int) -> DecodeSequence:
        handle = CrossKVHandle("r", slot, 0, "agent", b"", "", (), 0, 1500, 0, 0, "lease", 1.0)
        sequence = DecodeSequence(
            DecodeRequest("r", slot, 0, handle, OPTIONS, 1.0),
            Future(),
            arrived=0.0,
            deadline=1.0,
            n_new_max=self._prompts.n_new_max(OPTIONS),
            language="en",
            rows=[Row(slot, (slot,))],
            cross_pages=(slot,),
        )
        sequence.begin_attempt(self._prompts.eot)
        sequence.prompt = self._prompts.prompt(OPTIONS, "en")
        return sequence


def report(rows: dict[str, Figures]) -> dict[str, Any]:
    reference = rows[REFERENCE]
    found = {}
    for name, row in rows.items():
        gaps = np.abs(np.array(row.gaps) - np.array(reference.gaps))
        found[name] = {
            "rounding": {one.name: getattr(ROUNDINGS[name], one.name) for one in fields(Rounding)},
            **compare(row.texts, row.errors, reference.texts, reference.errors),
            "logprob_mean": round(float(gaps.mean()), 5),
            "logprob_most": round(float(gaps.max()), 4),
        }
    return {
        "model": "demo",
        "clips": len(reference.texts),
        "words": total(reference.errors).words,
        "tokens": len(reference.gaps),
        "torch": torch.__version__,
        "roundings": found,
    }


def print_table(made: dict[str, Any]) -> None:
    columns = ("in float32", "log probability, mean gap", "largest", *COLUMNS)
    table = Table(*columns, title="A GPU's bfloat16, emulated")
    for name, row in made["roundings"].items():
        table.add_row(
            "everything" if name == REFERENCE else name,
            f"{row['logprob_mean']:.4f}",
            f"{row['logprob_most']:.3f}",
            *cells(row, made["clips"]),
        )
    Console(width=120).print(table)


def main() -> int:
    args = clips_parser(__doc__).parse_args()
    use_threads(args.threads)
    clips = [clip for clip in clips_of(args) if clip.reference]
    heard = [(clip.pcm(), clip.reference or "") for clip in clips]
    heard = [(pcm, said) for pcm, said in heard if len(pcm) <= WINDOW_SAMPLES]
    rows = {}
    for name, rounding in ROUNDINGS.items():
        hearing, row = Hearing(rounding), Figures()
        for begin in range(0, len(heard), AT_ONCE):
            batch = heard[begin : begin + AT_ONCE]
            row.texts += hearing.hear([pcm for pcm, _ in batch])
            for page, (_, said) in enumerate(batch):
                row.gaps += hearing.logprobs(page, said)
        row.errors = count_all([said for _, said in heard], row.texts, "en")
        rows[name] = row
        print(f"transcribed with {name}", file=sys.stderr, flush=True)
    made = report(rows)
    print_table(made)
    print_result("gpu_rounding", made, args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
