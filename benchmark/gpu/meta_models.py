"""The served models on meta tensors: shapes without memory, for `benchmark.gpu.launches`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmark.shared.shapes import SHAPES
from cluster.model.checkpoint import open_checkpoint
from cluster.model.dims import EMBED_TOKENS, ModelDims, Shape, decoder_shapes
from cluster.model.encoder_context import MEL_PER_POSITION
from cluster.model.text.tokenizer import WhisperTokenizer
from decoder_worker.attention.append import Places, append_qkv, empty_queries
from decoder_worker.attention.base import AttentionBatch
from decoder_worker.attention.operators import append_to_pages, attend_pages
from decoder_worker.gpu.decoder import GpuDecoder
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.model import TextDecoder, TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.step import DecodeStep
from decoder_worker.tensors import DecoderTensors
from encoder_worker.gpu.encoder import Encoder, GpuEncoder
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import make_checkpoint, model_config

DTYPE = torch.bfloat16
PAGE_TOKENS = 64
LATEST_FIRST = 50
META = torch.device("meta")


class MetaAttention:
    """Implements `ProjectedAttention` for decode steps, by the operators that flashinfer's has."""

    def __init__(self, dims: ModelDims, n_rows: int) -> None:
        heads = (dims.n_text_head, dims.text_head_dim)
        self._pool = meta((n_rows, dims.n_text_layer, 2, PAGE_TOKENS, *heads))
        ints = [meta((n,), torch.int32) for n in (n_rows, n_rows, n_rows + 1, n_rows)]
        self._places = Places(*ints)
        self._last, self._before = meta((n_rows,), torch.int32), meta((n_rows,), torch.int32)
        self._workspace = meta((1,), torch.uint8)

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing depends on the batch."""

    def begin(self, positions: Tensor) -> None:
        self._places.positions.copy_(positions)
        torch.sub(self._places.positions, self._before, out=self._last)

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places, pages = self._places, (self._pool[:, layer, 0], self._pool[:, layer, 1])
        table = (places.indices, places.indptr, self._last)
        append_to_pages(k, v, places.entries, places.positions, *pages, *table)
        return self.cross_attention(layer, q)

    def attend_projected(self, layer: int, qkv: Tensor, bias: Tensor | None) -> Tensor:
        q = empty_queries(qkv, self._pool)
        append_qkv(qkv, bias, self._places, self._pool, layer, q)
        return self.cross_attention(layer, q)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        places, pages = self._places, (self._pool[:, layer, 0], self._pool[:, layer, 1])
        table = (places.indptr, places.indices, self._last)
        mixed: Tensor = attend_pages(q, *pages, *table, self._workspace, 0)
        return mixed


def decode_step(model: str, n_rows: int, *, fused: bool) -> Callable[[], Any]:
    """One decode step, from the slots and back to them, as a worker's graph would hold it.

    Args:
        model: a key of `benchmark.shared.shapes.SHAPES`.
        fused: with the layers and the sampler of few kernels; else with torch's.
    """
    step = _step(model, n_rows, fused=fused)
    decoder = decoder_of(model, n_rows, fused=fused)
    index = meta((n_rows,), torch.int64)
    return lambda: step(index, decoder, None)


def encode(
    model: str, n_windows: int, layers: str, positions: int | None = None
) -> Callable[[], Any]:
    """From features to states, for a batch of windows.

    Args:
        layers: "torch", "fused" or "float8".
        positions: encoder positions of each window; None: all.
    """
    dims = dims_of(model)
    checkpoint: Any = SimpleNamespace(dims=dims)
    on_meta = patch(
        "encoder_worker.model.load_tensors",
        lambda checkpoint, shapes, dtype, device: meta_tensors(shapes),
    )
    with on_meta:
        plain = AudioEncoder(checkpoint, DTYPE, META)
    encoder: Encoder = plain
    if layers != "torch":
        encoder = GpuEncoder(plain, float8=layers == "float8")
    n_frames = dims.n_mel_frames if positions is None else MEL_PER_POSITION * positions
    mel = meta((n_windows, dims.n_mels, n_frames))
    return lambda: encoder(mel)


def decoder_of(model: str, n_rows: int, *, fused: bool) -> TextDecoder:
    dims = dims_of(model)
    by_name = meta_tensors(decoder_shapes(dims))
    attention = MetaAttention(dims, n_rows)
    tensors = DecoderTensors(dims, DTYPE, by_name, by_name[EMBED_TOKENS])
    plain = TorchDecoder.of(tensors, attention)
    return GpuDecoder.of(plain, attention) if fused else plain


def dims_of(model: str) -> ModelDims:
    return ModelDims.from_config(model_config(SHAPES[model]))


def meta(shape: tuple[int, ...], dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def meta_tensors(shapes: dict[str, Shape]) -> dict[str, Tensor]:
    return {name: meta(shape) for name, shape in shapes.items()}


def _step(model: str, n_rows: int, *, fused: bool) -> DecodeStep:
    tokenizer = _tokenizer(model)
    slots = SlotTable(n_rows, META)
    rules = LogitRules(tokenizer, LATEST_FIRST, META)
    plain = TorchSampler(rules, slots)
    sampler = GpuSampler(plain, rules, slots) if fused else plain
    return DecodeStep(sampler, slots, rules, tokenizer.special.no_speech)


@cache
def _tokenizer(model: str) -> WhisperTokenizer:
    """Of a checkpoint with the model's vocabulary and small layers."""
    sizes = {"d_model": 16, "n_head": 1, "encoder_layers": 1, "decoder_layers": 1}
    folder = make_checkpoint(Path(mkdtemp()), SHAPES[model], **sizes)
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(folder)))
