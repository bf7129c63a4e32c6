"""The floating-point operations that one window of Whisper takes: matrix products and attention."""

from __future__ import annotations

from tests.support.checkpoints import ModelShape

FRAMES = 1500  # encoder positions of a window
START_TOKENS = 3  # transcript, language, task


def encoder_flops(shape: ModelShape, positions: int = FRAMES) -> float:
    d, t = shape.d_model, positions
    conv = 2 * 3 * (2 * t * shape.n_mels * d + t * d * d)
    return float(conv + shape.encoder_layers * (24 * d * d * t + 4 * t * t * d))


def projection_flops(shape: ModelShape, positions: int = FRAMES) -> float:
    """Of cross-attention's keys and values."""
    return float(4 * shape.decoder_layers * positions * shape.d_model**2)


def window_flops(shape: ModelShape, n_tokens: int) -> float:
    """Of one window: encoder, projection, decoder steps."""
    d, layers = shape.d_model, shape.decoder_layers
    step = 28 * layers * d * d + 2 * shape.n_vocab * d + 4 * layers * (FRAMES + n_tokens / 2) * d
    return encoder_flops(shape) + projection_flops(shape) + (n_tokens + START_TOKENS) * step
