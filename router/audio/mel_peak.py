"""The largest log10 mel power of a whole recording, found while it is decoded.

openai/whisper cuts a file's log-mel at 8 decades below the file's maximum, so windows that shall
have its features need that number before the first of them is encoded. Runs inside the audio
workers, in numpy: neither torch nor librosa, whose import alone takes longer than most uploads.
The filters are Slaney's auditory toolbox's, as Whisper was trained on.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cluster.messages import SAMPLE_RATE
from cluster.model.checkpoint import HOP_LENGTH, N_FFT

FLOOR = 1e-10  # power below which the logarithm is cut
_HALF = N_FFT // 2
_FULL_SCALE = 32_768.0

Samples = NDArray[np.float32]


class MelPeak:
    """Takes PCM block by block; frames are those of a centred STFT of the whole."""

    def __init__(self, n_mels: int) -> None:
        self._filters = mel_filters(n_mels).T  # [201, n_mels]
        turn = 2 * np.pi * np.arange(N_FFT) / N_FFT
        self._hann = (0.5 - 0.5 * np.cos(turn)).astype(np.float32)
        self._pending: Samples = np.empty(0, np.float32)  # what later frames still see
        self._has_begun = False
        self._power = 0.0

    def feed(self, pcm: NDArray[np.int16]) -> None:
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


def mel_filters(n_mels: int) -> Samples:
    """Triangles over the bins of an STFT, float32 [n_mels, 201], each of the same area."""
    bins_hz = np.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    corners_hz = _hz(np.linspace(0, _mel(SAMPLE_RATE / 2), n_mels + 2))
    widths_hz = np.diff(corners_hz)
    distances = corners_hz[:, None] - bins_hz  # [n_mels + 2, 201]
    rising = -distances[:-2] / widths_hz[:-1, None]
    falling = distances[2:] / widths_hz[1:, None]
    triangles = np.clip(np.minimum(rising, falling), 0, None)
    areas = (corners_hz[2:] - corners_hz[:-2]) / 2
    return (triangles / areas[:, None]).astype(np.float32)


# Slaney's mel scale: linear to 1 kHz, then 27 logarithmic steps to 6.4 kHz.
_HZ_PER_MEL = 200 / 3
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_LOG_STEP = math.log(6.4) / 27


def _mel(hz: float) -> float:
    if hz < _BREAK_HZ:
        return hz / _HZ_PER_MEL
    return _BREAK_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _HZ_PER_MEL, above)
