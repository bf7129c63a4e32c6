"""Log-mel features equal Hugging Face's, whatever the length and the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from encoder_worker.mel import LogMel
from tests.checkpoints import cached_checkpoint
from tests.reference import assert_close, hf_features, make_pcm

LENGTHS_S = [0.0001, 0.02, 1.0, 4.9973, 29.99, 30.0]


@pytest.mark.parametrize(("shape", "n_mels"), [("tiny", 80), ("large-v3", 128)])
def test_every_length_equals_the_reference(shape: str, n_mels: int) -> None:
    windows = [make_pcm(seconds, seed) for seed, seconds in enumerate(LENGTHS_S)]
    expected = hf_features(cached_checkpoint(shape), windows)
    log_mel = LogMel(n_mels)
    for window, reference in zip(windows, expected, strict=True):
        name = f"log-mel, {n_mels} bins, {len(window)} samples"
        assert_close(name, log_mel([window])[0], reference)


def test_a_ragged_batch_equals_its_windows_alone() -> None:
    windows = [make_pcm(seconds, seed) for seed, seconds in enumerate(LENGTHS_S)]
    log_mel = LogMel(80)
    batch = log_mel(windows)
    assert batch.shape == (len(windows), 80, 3000)
    assert batch.dtype == torch.float32
    for window, features in zip(windows, batch, strict=True):
        torch.testing.assert_close(features, log_mel([window])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("level", [0, 1, 32_767])
def test_silence_and_full_scale_equal_the_reference(level: int) -> None:
    window = np.full(16_000, level, dtype=np.int16)
    expected = hf_features(cached_checkpoint("tiny"), [window])
    ours = LogMel(80)([window])
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)


def test_floats_and_integers_give_the_same() -> None:
    window = make_pcm(2.0)
    log_mel = LogMel(80)
    torch.testing.assert_close(log_mel([window]), log_mel([window.astype(np.float32) / 32_768]))
