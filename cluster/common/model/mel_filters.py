"""Whisper's mel filters, made by librosa. No torch, so that the router can use it.

`python -m cluster.common.model.mel_filters` writes the file beside this module, which holds the
filters of every published number of bins. Reading it takes a hundredth of the second that importing
librosa takes, and 2 MB instead of 79 MB of each audio worker's memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.checkpoint import N_FFT

PUBLISHED = (80, 128)  # bins of published checkpoints
_FILE = Path(__file__).with_suffix(".npz")


def mel_filters(n_mels: int) -> NDArray[np.float32]:
    """Triangles over the bins of an STFT, float32 [n_mels, 201], each of the same area.

    Where `n_mels` may be none of `PUBLISHED`, call `ensure_jit_cache` first: librosa imports numba.
    """
    if n_mels not in PUBLISHED:
        return make_mel_filters(n_mels)
    with np.load(_FILE) as published:
        filters: NDArray[np.float32] = published[f"mel_{n_mels}"]
    return filters


def make_mel_filters(n_mels: int) -> NDArray[np.float32]:
    """As `mel_filters`, computed by librosa on Slaney's scale."""
    import librosa  # slow to import, and hardly ever needed

    filters: NDArray[np.float32] = librosa.filters.mel(sr=SAMPLE_RATE, n_fft=N_FFT, n_mels=n_mels)
    return filters


def main() -> None:
    np.savez_compressed(_FILE, mel_80=make_mel_filters(80), mel_128=make_mel_filters(128))


if __name__ == "__main__":
    main()
