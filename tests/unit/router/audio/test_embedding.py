"""Which files are networks of speaker embeddings, and what goes into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings, SpeakerSettings
from router.audio.embedding import FRAMES, N_MELS, SpeakerNetwork, fbank, windows_of
from tests.support.speaker_networks import write_network


def test_a_network_gives_vectors_of_length_one(tmp_path: Path) -> None:
    network = SpeakerNetwork(write_network(tmp_path / "voices.onnx", size=24))
    windows = np.random.default_rng(0).standard_normal((3, FRAMES, N_MELS)).astype(np.float32)
    vectors = network.embed(list(windows))
    assert vectors.shape == (3, 24)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    louder = network.embed([windows[0] + 2])
    assert np.allclose(louder, vectors[:1], atol=1e-4), "a gain must not change a voice"


@pytest.mark.parametrize(
    ("form", "reason"),
    [({"n_mels": 40}, "80"), ({"inputs": 2}, "frames"), ({"scale": 0.0}, "same vector")],
)
def test_another_network_is_refused(tmp_path: Path, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"speakers\.model.*{reason}"):
        SpeakerNetwork(write_network(tmp_path / "other.onnx", **form))
    (tmp_path / "text.onnx").write_text("hello")
    for name in ("text.onnx", "missing.onnx"):
        with pytest.raises(ConfigurationError, match=name):
            SpeakerNetwork(tmp_path / name)


@pytest.mark.parametrize(
    ("seconds", "n_windows"), [(0.2, 0), (0.5, 1), (1.5, 1), (2.0, 2), (3.0, 3), (3.1, 3), (10, 12)]
)
def test_windows_cover_a_stretch_to_its_end(seconds: float, n_windows: int) -> None:
    pcm = np.random.default_rng(0).normal(0, 1000, round(16_000 * seconds)).astype(np.int16)
    windows = windows_of(pcm)
    assert len(windows) == n_windows
    assert all(features.shape == (FRAMES, N_MELS) for _, features in windows)
    if seconds > 1.5:
        middles = [middle for middle, _ in windows]
        assert middles[0] == 12_000
        assert abs(middles[-1] - (pcm.shape[0] - 12_000)) <= 400
        assert max(np.diff(middles)) <= 16_000


def test_features_are_kaldis() -> None:
    """Every eighth band of the last frame of a rising tone, as kaldi-native-fbank 1.23 has it."""
    kaldi = [11.098, 11.340, 12.030, 10.829, 11.732, 12.300, 13.055, 14.153, 20.415, 24.934]
    features = fbank((3000 * np.sin(np.arange(1_200) ** 2 / 900)).astype(np.int16))
    assert features.shape == (6, N_MELS)
    assert features.dtype == np.float32
    assert np.allclose(features[-1, ::8], kaldi, atol=2e-3)


def test_the_bundled_network_is_small_and_goes_with_the_bundled_model_alone() -> None:
    bundled = Settings().speaker_network().model
    assert bundled is not None
    assert Path(bundled).stat().st_size < 2_000_000
    SpeakerNetwork(Path(bundled))
    assert Settings(model="turbo").speaker_network().model is None
    asked = SpeakerSettings(model="demo", threshold=0.4)
    found = Settings(model="turbo", speakers=asked).speaker_network()
    assert (found.model, found.threshold) == (bundled, 0.4)
    own = Settings(speakers=SpeakerSettings(model="/own.onnx")).speaker_network()
    assert own.model == "/own.onnx"
