"""The peak that is found block by block is the maximum of openai-whisper's whole spectrogram."""

from __future__ import annotations

import math

import numpy as np
import pytest
import whisper.audio
from numpy.typing import NDArray

from router.audio.worker import MelPeak
from tests.support.references.hugging_face import make_pcm


def peak_of(pcm: NDArray[np.int16], block: int, n_mels: int = 80) -> float:
    peak = MelPeak(n_mels)
    for start in range(0, pcm.shape[0], block):
        peak.feed(pcm[start : start + block])
    return peak.finish()


def reference(pcm: NDArray[np.int16], n_mels: int = 80) -> float:
    floats = pcm.astype(np.float32) / 32_768
    scaled = whisper.audio.log_mel_spectrogram(floats, n_mels, padding=whisper.audio.N_SAMPLES)
    return float(scaled.max()) * 4 - 4


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("block", [1, 160, 199, 7_777, 10**9])
def test_blocks_of_any_size_give_the_references_maximum(block: int, n_mels: int) -> None:
    pcm = make_pcm(0.05 if block == 1 else 7.3, seed=5)
    assert peak_of(pcm, block, n_mels) == pytest.approx(reference(pcm, n_mels), abs=1e-5)


@pytest.mark.parametrize("n_samples", [1, 40, 199, 200, 201, 359, 400, 401])
def test_files_shorter_than_a_frame(n_samples: int) -> None:
    pcm = make_pcm(1.0, seed=6)[8_000 : 8_000 + n_samples]
    assert peak_of(pcm, 64) == pytest.approx(reference(pcm), abs=1e-5)


@pytest.mark.parametrize("at", [0, 3, 150, -1, -150, -161])
def test_a_click_at_an_edge_counts_as_in_the_reference(at: int) -> None:
    """Only there do the reflection before the file and the zeros behind it matter."""
    pcm = np.zeros(32_077, np.int16)
    pcm[at] = 30_000
    assert peak_of(pcm, 8_000) == pytest.approx(reference(pcm), abs=1e-5)


def test_silence_is_at_the_floor() -> None:
    assert math.isclose(peak_of(np.zeros(16_000, np.int16), 8_000), -10.0)
