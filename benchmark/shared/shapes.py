"""The shapes of the published models, in full, for random weights."""

from __future__ import annotations

from dataclasses import replace

from tests.support.checkpoints import ModelShape

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
