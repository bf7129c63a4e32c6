"""Hugging Face's Whisper as the reference of parity tests, and audio to feed both sides."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE
from tests.support.checkpoints import SHAPES

QUICK = ("tiny", "tiny.en", "base", "large-v3")  # the others differ in width or depth alone
FAMILIES = [
    shape if shape in QUICK else pytest.param(shape, marks=pytest.mark.slow)
    for shape in SHAPES
    if shape != "micro"
]


@functools.lru_cache(maxsize=1)
def hf_model(folder: Path) -> Any:
    """In float32, with exactly the tensors that the reference asks for; the last one is kept."""
    from transformers import WhisperForConditionalGeneration

    model, loading = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


@functools.lru_cache(maxsize=2)
def hf_feature_extractor(folder: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(folder)


def hf_features(folder: Path, windows: list[NDArray[np.int16]]) -> torch.Tensor:
    """Log-mel of int16 windows by the reference: [len(windows), n_mels, 3000]."""
    extractor = hf_feature_extractor(folder)
    floats = [window.astype(np.float32) / 32_768 for window in windows]
    features = extractor(floats, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    return features.input_features


def cross_kv(model: Any, states: torch.Tensor) -> torch.Tensor:
    """The reference's own projections of [1, frames, state]: [n_frames, layer, 2, head, dim]."""
    layers = [layer.encoder_attn for layer in model.model.decoder.layers]
    kv = torch.stack(
        [torch.stack((a.k_proj(states[0]), a.v_proj(states[0])), dim=1) for a in layers], dim=1
    )
    return kv.unflatten(-1, (layers[0].num_heads, -1))


def make_pcm(seconds: float, seed: int = 0) -> NDArray[np.int16]:
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 120 + 40 * np.sin(2 * np.pi * 0.7 * t + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    voice = sum(rng.uniform(0.2, 1) / n * np.sin(n * phase) for n in range(1, 24))
    syllables = np.clip(np.sin(2 * np.pi * 3.1 * t + rng.uniform(0, 6)), 0, None)
    signal = 0.2 * voice * syllables + 0.002 * rng.standard_normal(t.shape)
    return (np.clip(signal, -1, 1) * 32_767).astype(np.int16)


def assert_close(name: str, ours: torch.Tensor, theirs: torch.Tensor, share: float = 1e-4) -> None:
    """Equal within `share` of the reference's range; prints the largest difference."""
    assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    largest = (ours.float() - theirs).abs().max().item()
    span = (theirs.max() - theirs.min()).item()
    line = (
        f"{name}: differs by at most {largest:.2e}, {largest / span:.1e} of a range of {span:.3g}"
    )
    print(line)
    assert largest <= share * span, line
