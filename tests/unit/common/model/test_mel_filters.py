"""The filters that ship are those that librosa makes, and no published size needs librosa."""

from __future__ import annotations

import subprocess
import sys

import librosa
import numpy as np
import pytest

from cluster.common.model.mel_filters import PUBLISHED, mel_filters


@pytest.mark.parametrize("n_mels", [*PUBLISHED, 40])
def test_filters_equal_librosas(n_mels: int) -> None:
    expected = librosa.filters.mel(sr=16_000, n_fft=400, n_mels=n_mels)
    assert mel_filters(n_mels).dtype == np.float32
    np.testing.assert_allclose(mel_filters(n_mels), expected, rtol=0, atol=1e-7)


def test_published_sizes_are_read_without_librosa_and_torch() -> None:
    code = (
        "import sys; from cluster.common.model.mel_filters import PUBLISHED, mel_filters; "
        "assert all(mel_filters(n).shape == (n, 201) for n in PUBLISHED); "
        "assert not {'librosa', 'numba', 'torch'} & set(sys.modules), 'slow to import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
