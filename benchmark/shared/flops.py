"""The published models' shapes, and what a window takes at the least: operations, and bytes read.

A device takes no less than operations over its one rate, or bytes over the other: the ceiling of
what `benchmark.gpu` measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.support.checkpoints import ModelShape

FRAMES = 1500  # encoder positions of a window
ITEM_BYTES = 2  # of every number of a GPU: weights and KV are in 16 bit
START_TOKENS = 3  # transcript, language, task

_LARGE_V3 = ModelShape(
    1280, 20, 32, 32, n_mels=128, n_vocab=51_866, n_languages=100, no_speech="<|nospeech|>"
)
SHAPES = {
    "tiny": ModelShape(384, 6, 4, 4),
    "base": ModelShape(512, 8, 6, 6),
    "small": ModelShape(768, 12, 12, 12),
    "medium": ModelShape(1024, 16, 24, 24),
    "large-v3": _LARGE_V3,
    "large-v3-turbo": replace(_LARGE_V3, decoder_layers=4),
}


def encoder_flops(shape: ModelShape) -> float:
    d, t = shape.d_model, FRAMES
    conv = 2 * 3 * (2 * t * shape.n_mels * d + t * d * d)
    return float(conv + shape.encoder_layers * (24 * d * d * t + 4 * t * t * d))


def projection_flops(shape: ModelShape) -> float:
    return float(4 * shape.decoder_layers * FRAMES * shape.d_model**2)


def window_flops(shape: ModelShape, n_tokens: int) -> float:
    d, layers = shape.d_model, shape.decoder_layers
    step = 28 * layers * d * d + 2 * shape.n_vocab * d + 4 * layers * (FRAMES + n_tokens / 2) * d
    return encoder_flops(shape) + projection_flops(shape) + (n_tokens + START_TOKENS) * step


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: of a dense bf16 matrix product, per second; bytes_per_s: of its memory."""

    flops: float
    bytes_per_s: float

    def encode_s(self, shape: ModelShape) -> float:
        """Of one window: the encoder, and the projection to cross-attention's KV."""
        return (encoder_flops(shape) + projection_flops(shape)) / self.flops

    def step_s(self, shape: ModelShape, n_tokens: int, batch: int) -> float:
        """Of one decode step of `batch` sequences in the middle of a text of `n_tokens`."""
        layers, d = shape.decoder_layers, shape.d_model
        weights = 14 * layers * d**2 + shape.n_vocab * d
        kv = 2 * layers * d * (FRAMES + START_TOKENS + 1 + n_tokens / 2)
        return ITEM_BYTES * (weights + batch * kv) / self.bytes_per_s

    def windows_per_s(self, shape: ModelShape, n_tokens: int, batch: int) -> tuple[float, float]:
        """Where encoding and decoding take turns, and where they overlap fully."""
        encode_s = self.encode_s(shape)
        decode_s = n_tokens * self.step_s(shape, n_tokens, batch) / batch
        return 1 / (encode_s + decode_s), 1 / max(encode_s, decode_s)


H200 = Gpu(790e12, 4.3e12)  # as measured, not the data sheet's 989e12 and 4.8e12
