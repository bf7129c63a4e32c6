"""Whisper's mel filters. No torch, so that the router can use them.

`python -m cluster.common.model.mel_filters` writes the file beside this module, which saves the
second and the 77 MB that importing librosa takes.
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
    """Return triangles of equal area over the bins of an STFT, float32 [n_mels, 201].

    Call `ensure_jit_cache` first if `n_mels` may not be in `PUBLISHED`: librosa imports numba.
    """
    if n_mels not in PUBLISHED:
        return make_mel_filters(n_mels)
    with np.load(_FILE) as published:
        filters: NDArray[np.float32] = published[f"mel_{n_mels}"]
    return filters


def make_mel_filters(n_mels: int) -> NDArray[np.float32]:
    import librosa  # slow to import, and hardly ever needed

    filters: NDArray[np.float32] = librosa.filters.mel(sr=SAMPLE_RATE, n_fft=N_FFT, n_mels=n_mels)
    return filters


def main() -> None:
    np.savez_compressed(_FILE, mel_80=make_mel_filters(80), mel_128=make_mel_filters(128))


if __name__ == "__main__":
    main()
