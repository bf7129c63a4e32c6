"""Whisper's mel filters, as librosa makes them. No torch, so that the router can use it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.checkpoint import N_FFT

# Slaney's scale: linear up to 1000 Hz, which are 15 mels, then logarithmic.
LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0
MELS_PER_E = 27.0 / np.log(6.4)  # 27 mels more are 6.4 times the frequency


def mel_filters(n_mels: int) -> NDArray[np.float32]:
    """Triangles over the bins of an STFT, float32 [n_mels, 201], each of the same area."""
    highest = LINEAR_MELS + np.log(SAMPLE_RATE / 2 / LINEAR_HZ) * MELS_PER_E
    mels = np.linspace(0.0, highest, n_mels + 2)
    linear = mels * LINEAR_HZ / LINEAR_MELS
    above = LINEAR_HZ * np.exp((mels - LINEAR_MELS) / MELS_PER_E)
    hz = np.where(mels < LINEAR_MELS, linear, above)
    behind = np.linspace(0.0, SAMPLE_RATE / 2, N_FFT // 2 + 1) - hz[:, None]
    widths = np.diff(hz)[:, None]
    triangles = np.minimum(behind[:-2] / widths[:-1], -behind[2:] / widths[1:])
    heights = 2.0 / (hz[2:] - hz[:-2])
    filters: NDArray[np.float32] = np.maximum(0.0, triangles).astype(np.float32)
    filters *= heights[:, None]
    return filters
