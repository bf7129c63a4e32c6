"""The least time that a GPU can take for Whisper: the ceiling of what `benchmark.gpu` measures.

The least time is operations over the device's rate, or bytes over its bandwidth.
Counts matrix products and attention of the encoder as operations, weights and KV that a decode step
reads as bytes; whatever else a kernel does is free. So no program is faster, and the distance to
it is what there is to gain. The formulas know shapes and two rates, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.shared.flops import FRAMES, encoder_flops, projection_flops
from tests.support.checkpoints import ModelShape

PROMPT_TOKENS = 4
ITEM_BYTES = 2  # of every number: weights and KV are in 16 bit


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: of a dense bf16 matrix product, per second; bytes_per_s: of its memory."""

    flops: float
    bytes_per_s: float


H200 = Gpu(790e12, 4.3e12)  # as measured, not the data sheet's 989e12 and 4.8e12


@dataclass(frozen=True, slots=True)
class Work:
    """tokens: decode steps of a window; batch: sequences in a step."""

    tokens: int
    batch: int


def weight_bytes(shape: ModelShape) -> float:
    """Of the decoder, read once in each step whatever the batch."""
    parameters = 14 * shape.decoder_layers * shape.d_model**2 + shape.n_vocab * shape.d_model
    return ITEM_BYTES * parameters


def kv_bytes(shape: ModelShape, positions: float) -> float:
    """Keys and values of all decoder layers at so many positions."""
    return ITEM_BYTES * 2 * shape.decoder_layers * positions * shape.d_model


def step_bytes(shape: ModelShape, work: Work) -> float:
    """Of one decode step in the middle of the text."""
    seen = PROMPT_TOKENS + work.tokens / 2
    return weight_bytes(shape) + work.batch * kv_bytes(shape, FRAMES + seen)


def encode_s(shape: ModelShape, gpu: Gpu) -> float:
    """Of one window: the encoder, and the projection to cross-attention's KV."""
    return (encoder_flops(shape) + projection_flops(shape)) / gpu.flops


def step_s(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    return step_bytes(shape, work) / gpu.bytes_per_s


def decode_s(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Of one window, its share of each of its steps."""
    return work.tokens * step_s(shape, gpu, work) / work.batch


def time_sliced(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Windows per second where the halves take turns."""
    return 1 / (encode_s(shape, gpu) + decode_s(shape, gpu, work))


def overlapped(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Windows per second where arithmetic and memory traffic overlap fully."""
    return 1 / max(encode_s(shape, gpu), decode_s(shape, gpu, work))
