"""The filters are those of librosa, to the bit."""

from __future__ import annotations

import librosa
import numpy as np
import pytest

from cluster.common.model.mel_filters import mel_filters


@pytest.mark.parametrize("n_mels", [80, 128, 40])
def test_filters_equal_librosas(n_mels: int) -> None:
    expected = librosa.filters.mel(sr=16_000, n_fft=400, n_mels=n_mels)
    assert mel_filters(n_mels).dtype == np.float32
    assert np.array_equal(mel_filters(n_mels), expected)
