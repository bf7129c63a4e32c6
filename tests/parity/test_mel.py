"""Log-mel features equal Hugging Face's, and slices of a file's equal openai-whisper's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import whisper.audio
from numpy.typing import NDArray

from cluster.common.messages import MEL_CONTEXT_SAMPLES, FileMel
from encoder_worker.mel import LogMel
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import assert_close, hf_features, make_pcm

LENGTHS_S = [0.0001, 0.02, 1.0, 4.9973, 29.99, 30.0]


@pytest.mark.parametrize(("shape", "n_mels"), [("tiny", 80), ("large-v3", 128)])
def test_every_length_equals_the_reference(shape: str, n_mels: int) -> None:
    windows = [make_pcm(seconds, seed) for seed, seconds in enumerate(LENGTHS_S)]
    expected = hf_features(cached_checkpoint(shape), windows)
    log_mel = LogMel(n_mels)
    for window, reference in zip(windows, expected, strict=True):
        name = f"log-mel, {n_mels} bins, {len(window)} samples"
        assert_close(name, log_mel([window])[0], reference)


@pytest.mark.parametrize("level", [0, 1, 32_767])
def test_silence_and_full_scale_equal_the_reference(level: int) -> None:
    window = np.full(16_000, level, dtype=np.int16)
    expected = hf_features(cached_checkpoint("tiny"), [window])
    ours = LogMel(80)([window])
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)


HOP = 160
FILE_S = 71.2345  # ends inside a hop


@pytest.fixture(scope="module")
def file_pcm() -> NDArray[np.int16]:
    """A loud and a faint part, so that a window's own maximum is not its file's."""
    loud, faint = make_pcm(35.0, seed=1), make_pcm(FILE_S - 35.0, seed=2) // 40
    return np.concatenate((loud, faint))


def whole_log_mel(pcm: NDArray[np.int16], n_mels: int) -> torch.Tensor:
    """openai-whisper's spectrogram of a file and 30 s of silence behind it."""
    floats = pcm.astype(np.float32) / 32_768
    features: torch.Tensor = whisper.audio.log_mel_spectrogram(
        floats, n_mels, padding=whisper.audio.N_SAMPLES
    )
    return features


def log_max_of(features: torch.Tensor) -> float:
    """The scaled maximum, before scaling."""
    return float(features.max()) * 4 - 4


def cut(
    pcm: NDArray[np.int16], seek: int, n_frames: int, log_max: float
) -> tuple[NDArray[np.int16], FileMel]:
    """What the router sends of the window at mel frame `seek`."""
    n_before = min(MEL_CONTEXT_SAMPLES, seek * HOP)
    first, last = seek * HOP - n_before, (seek + n_frames) * HOP + MEL_CONTEXT_SAMPLES
    return pcm[first:last], FileMel(n_before, n_frames, log_max)


def reference_slice(features: torch.Tensor, seek: int, n_frames: int) -> torch.Tensor:
    padded: torch.Tensor = whisper.audio.pad_or_trim(features[:, seek : seek + n_frames], 3000)
    return padded


@pytest.mark.parametrize("n_mels", [80, 128])
def test_slices_of_a_file_equal_the_references(file_pcm: NDArray[np.int16], n_mels: int) -> None:
    features = whole_log_mel(file_pcm, n_mels)
    n_content, log_max = file_pcm.shape[0] // HOP, log_max_of(features)
    seeks = [0, 1, 2, 3, 777, 3000, 4123, n_content - 2999, n_content - 150, n_content - 1]
    spans = [(seek, min(3000, n_content - seek)) for seek in seeks]
    spans += product((0, 1, 500), (1, 2, 3, 80))  # the file goes on after the slice
    log_mel = LogMel(n_mels)
    for seek, n_frames in spans:
        window, file_mel = cut(file_pcm, seek, n_frames, log_max)
        expected = reference_slice(features, seek, n_frames)
        found = log_mel([window], [file_mel])[0]
        assert_close(f"{n_frames} frames at {seek}, {n_mels} bins", found, expected, share=1e-5)
        assert (found[:, n_frames:] == 0).all()


@pytest.mark.parametrize("seconds", [0.01, 0.1, 4.0, 29.99])
def test_silence_behind_a_short_file_is_silence_where_frames_are_asked_for(seconds: float) -> None:
    """What language detection hears: 30 s, whatever of it the file fills."""
    pcm = make_pcm(seconds, seed=3)
    features = whole_log_mel(pcm, 80)
    found = LogMel(80)([pcm], [FileMel(0, 3000, log_max_of(features))])[0]
    assert_close(f"{seconds} s in 30 s", found, features[:, :3000], share=1e-5)


def test_a_batch_of_slices_and_windows_equals_each_alone(file_pcm: NDArray[np.int16]) -> None:
    log_mel = LogMel(80)
    windows = [file_pcm[:480_000], file_pcm[:4_000]]
    slices: list[FileMel | None] = [None, None]
    for seek, n_frames in ((900, 3000), (0, 3000), (7100, 23)):
        window, file_mel = cut(file_pcm, seek, n_frames, 1.25)
        windows.append(window)
        slices.append(file_mel)
    batch = log_mel(windows, slices)
    for window, file_mel, features in zip(windows, slices, batch, strict=True):
        alone = log_mel([window], [file_mel])[0]
        torch.testing.assert_close(features, alone, rtol=0, atol=1e-5)
