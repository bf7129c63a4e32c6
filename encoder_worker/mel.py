"""Log-mel spectrogram of one or many windows, as Whisper was trained on (openai/whisper, audio.py).

Each window is padded with zeros to 30 s and scaled by its own maximum. Knows nothing of files,
queues or whole recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import SAMPLE_RATE, WINDOW_SAMPLES
from cluster.model.checkpoint import HOP_LENGTH, N_FFT

N_FRAMES = WINDOW_SAMPLES // HOP_LENGTH  # 3000 mel frames in a window, 10 ms each
INT16_SCALE = 32_768.0
_FLOOR = 1e-10  # power below which the logarithm is cut
_LOG_FLOOR = -10.0  # log10 of it: every frame that sees only padding
_RANGE = 8.0  # decades kept below the window's maximum


class LogMel:
    """Features on one device: `LogMel(80, "cpu")([pcm, pcm])`."""

    def __init__(self, n_mels: int, device: torch.device | str = "cpu") -> None:
        import librosa  # slow to import, and only workers need it

        self.device = torch.device(device)
        self.n_mels = n_mels
        filters = librosa.filters.mel(sr=SAMPLE_RATE, n_fft=N_FFT, n_mels=n_mels)
        self._filters = torch.from_numpy(filters).to(self.device)  # [n_mels, 201]
        self._hann = torch.hann_window(N_FFT, device=self.device)

    def __call__(self, windows: Sequence[NDArray[Any]]) -> Tensor:
        """Features of ragged windows.

        Args:
            windows: each int16 [n], or floats in -1..1 [n], 16 kHz, n <= 480000.

        Returns:
            float32 [len(windows), n_mels, 3000] on the device.
        """
        pcm = self._pad(windows)
        spectrum = torch.stft(pcm, N_FFT, HOP_LENGTH, window=self._hann, return_complex=True)
        power = spectrum[..., :-1].abs() ** 2  # [B, 201, n]
        log_mel = (self._filters @ power).clamp(min=_FLOOR).log10()
        floor = log_mel.amax(dim=(1, 2), keepdim=True) - _RANGE
        features = torch.maximum(log_mel, floor)
        n_rest = N_FRAMES - log_mel.shape[-1]
        if n_rest:
            rest = floor.clamp(min=_LOG_FLOOR).expand(-1, self.n_mels, n_rest)
            features = torch.cat((features, rest), dim=-1)
        return (features + 4.0) / 4.0

    def _pad(self, windows: Sequence[NDArray[Any]]) -> Tensor:
        """Zero-pad to one length, float32 [B, n]: the longest window's and one frame more.

        Frames after that see nothing but zeros, so they are filled in and not computed.
        """
        longest = max(window.shape[0] for window in windows)
        n_frames = -(-(longest + N_FFT) // HOP_LENGTH)
        n_samples = min(n_frames * HOP_LENGTH, WINDOW_SAMPLES)
        pcm = np.zeros((len(windows), n_samples), dtype=np.float32)
        for row, window in zip(pcm, windows, strict=True):
            if window.dtype == np.int16:
                np.divide(window, INT16_SCALE, out=row[: window.shape[0]], dtype=np.float32)
            else:
                row[: window.shape[0]] = window
        return torch.from_numpy(pcm).to(self.device)
