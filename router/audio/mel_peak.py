"""The largest log10 mel power of a whole recording, found while it is decoded.

openai/whisper cuts a file's log-mel at 8 decades below the file's maximum, so windows that shall
have its features need that number before the first of them is encoded. Runs inside the audio
workers, in numpy: the router runs without torch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cluster.common.kernels.cpu.cache import ensure_jit_cache
from cluster.common.messages import HOP_LENGTH, Pcm
from cluster.common.model.checkpoint import N_FFT
from cluster.common.model.mel_filters import mel_filters

FLOOR = 1e-10  # power below which the logarithm is cut
_HALF = N_FFT // 2
_FULL_SCALE = 32_768.0

Samples = NDArray[np.float32]


class MelPeak:
    """Takes PCM block by block; frames are those of a centred STFT of the whole."""

    def __init__(self, n_mels: int) -> None:
        ensure_jit_cache()  # librosa may be needed
        self._filters = mel_filters(n_mels).T  # [201, n_mels]
        turn = 2 * np.pi * np.arange(N_FFT) / N_FFT
        self._hann = (0.5 - 0.5 * np.cos(turn)).astype(np.float32)
        self._pending: Samples = np.empty(0, np.float32)  # what later frames still see
        self._has_begun = False
        self._power = 0.0

    def feed(self, pcm: Pcm) -> None:
        """Take the next samples, int16 [n]."""
        self._take(pcm.astype(np.float32) / np.float32(_FULL_SCALE))

    def finish(self) -> float:
        """The peak, after the last `feed`: zeros follow the recording."""
        self._take(np.zeros(N_FFT, np.float32))
        return math.log10(max(self._power, FLOOR))

    def _take(self, samples: Samples) -> None:
        self._pending = np.concatenate((self._pending, samples))
        if not self._has_begun:
            if self._pending.shape[0] <= _HALF:
                return
            reflected = self._pending[_HALF:0:-1]  # what an STFT's first frames see before it
            self._pending = np.concatenate((reflected, self._pending))
            self._has_begun = True
        if self._pending.shape[0] >= N_FFT:
            self._scan()

    def _scan(self) -> None:
        frames = sliding_window_view(self._pending, N_FFT)[::HOP_LENGTH]  # [n, 400]
        spectrum = np.fft.rfft(frames * self._hann)  # [n, 201]
        power = spectrum.real**2 + spectrum.imag**2
        self._power = max(self._power, float((power @ self._filters).max()))
        self._pending = self._pending[frames.shape[0] * HOP_LENGTH :]
