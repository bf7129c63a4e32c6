"""The published models' shapes, and the operations of a window: matrix products and attention."""

from __future__ import annotations

from dataclasses import replace

from tests.support.checkpoints import ModelShape

FRAMES = 1500  # encoder positions of a window
ITEM_BYTES = 2  # of weights and KV on a GPU
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
