"""Log-mel spectrograms of windows, as Whisper was trained on (openai/whisper, audio.py).

A window is padded with zeros to 30 s and scaled by its own maximum; one with a `FileMel` is a slice
of its file's spectrogram, scaled by the file's maximum. Both kinds may share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.common.kernels.cpu.cache import ensure_jit_cache
from cluster.common.messages import (
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    WINDOW_FRAMES,
    WINDOW_SAMPLES,
    FileMel,
)
from cluster.common.model.checkpoint import N_FFT
from cluster.common.model.mel_filters import mel_filters

INT16_SCALE = 32_768.0
_HALF = N_FFT // 2  # a frame looks 200 samples to each side of its middle
_FLOOR = 1e-10  # power below which the logarithm is cut
_LOG_FLOOR = -10.0  # its log10, the value of frames that see only padding
_RANGE = 8.0  # decades kept below the maximum
_FRAMES = WINDOW_FRAMES + MEL_CONTEXT_SAMPLES // HOP_LENGTH  # 3002: up to two of context in front
ROW_SAMPLES = (_FRAMES - 1) * HOP_LENGTH + N_FFT - _HALF  # 480360: what these frames see
N_MARKS = 5  # int32 columns of a row of marks


class LogMel:
    def __init__(self, n_mels: int, device: torch.device | str = "cpu") -> None:
        ensure_jit_cache()  # for librosa, which may be needed
        self.device = torch.device(device)
        self.n_mels = n_mels
        self._filters = torch.from_numpy(mel_filters(n_mels)).to(self.device)  # [n_mels, 201]
        self._hann = torch.hann_window(N_FFT, device=self.device)

    def __call__(
        self,
        windows: Sequence[NDArray[Any]],
        file_mels: Sequence[FileMel | None] | None = None,
    ) -> Tensor:
        """Features of ragged windows, float32 [len(windows), n_mels, 3000] on the device.

        windows: each int16 [n], 16 kHz, n <= 480000; a `FileMel` adds up to 320 samples of context
        on each side. file_mels: None for a window without one.
        """
        slices = [None] * len(windows) if file_mels is None else file_mels
        log_mel = self.log_power(self._pad(windows, slices))
        features = log_mel.new_zeros(len(windows), self.n_mels, WINDOW_FRAMES)
        for row, frames, file_mel in zip(features, log_mel, slices, strict=True):
            _scale(row, frames, file_mel)
        return features

    def log_power(self, pcm: Tensor) -> Tensor:
        """pcm float32 [B, n] on the device -> log10 mel power [B, n_mels, 1 + (n - 400) // 160]."""
        spectrum = torch.stft(
            pcm, N_FFT, HOP_LENGTH, window=self._hann, center=False, return_complex=True
        )
        power = spectrum.abs() ** 2  # [B, 201, frames]
        return (self._filters @ power).clamp(min=_FLOOR).log10()

    def _pad(self, windows: Sequence[NDArray[Any]], slices: Sequence[FileMel | None]) -> Tensor:
        """Windows padded to one length, float32 [B, 200 + n], their start reflected in front.

        n covers the longest window and the zeros that its last frames see; later frames are
        constant and are not computed. Only frame 0 sees the reflection, so no frame with true
        context does.
        """
        n_frames = max(2, *map(_frames_needed, windows, slices))
        pcm = np.zeros((len(windows), (n_frames - 1) * HOP_LENGTH + N_FFT), dtype=np.float32)
        for row, window, file_mel in zip(pcm, windows, slices, strict=True):
            own = row[_HALF : _HALF + window.shape[0]]
            samples = window[: own.shape[0]]  # context that no frame sees is left out
            np.divide(samples, INT16_SCALE, out=own, dtype=np.float32)
            row[:_HALF] = row[2 * _HALF : _HALF : -1]
            if file_mel is None:
                _reflect_end(row)
        return torch.from_numpy(pcm).to(self.device)


def scaled(log_power: Tensor, peak: Tensor) -> Tensor:
    """log_power [B, n_mels, frames], peak [B]: clamp to 8 decades below the peak, and scale."""
    return (torch.maximum(log_power, (peak - _RANGE)[:, None, None]) + 4.0) / 4.0


def _frames_needed(window: NDArray[Any], file_mel: FileMel | None) -> int:
    """Number of frames to compute: enough for all that see a sample of the window."""
    with_edges = -(-(len(window) + N_FFT) // HOP_LENGTH)
    if file_mel is None:
        return min(with_edges, WINDOW_FRAMES)
    return min(with_edges, file_mel.n_before // HOP_LENGTH + file_mel.n_frames)


def _reflect_end(row: NDArray[np.float32]) -> None:
    end = _HALF + WINDOW_SAMPLES
    n_behind = min(row.shape[0] - end, _HALF)
    if n_behind > 0:
        row[end : end + n_behind] = row[end - 2 : end - 2 - n_behind : -1]


def _scale(row: Tensor, frames: Tensor, file_mel: FileMel | None) -> None:
    """Write a window's frames [n_mels, n], then the value of padding; 0.0 behind a slice."""
    _, first, n_frames, *_ = marks_of(0, file_mel)
    own, filled = frames[:, first : first + n_frames], row[:, :n_frames]
    floor = own.max() - _RANGE if file_mel is None else own.new_tensor(file_mel.log_max - _RANGE)
    filled[:, : own.shape[1]] = torch.maximum(own, floor)
    filled[:, own.shape[1] :] = floor.clamp(min=_LOG_FLOOR)
    filled.add_(4.0).div_(4.0)


def marks_of(n_samples: int, file_mel: FileMel | None) -> tuple[int, int, int, int, float]:
    """A row of marks: samples, first frame, number of frames, is a slice, file's maximum."""
    if file_mel is None:
        return n_samples, 0, WINDOW_FRAMES, 0, 0.0
    first = file_mel.n_before // HOP_LENGTH
    return n_samples, first, file_mel.n_frames, 1, file_mel.log_max


class FixedLogMel:
    def __init__(self, log_mel: LogMel) -> None:
        self._log_mel = log_mel
        self._samples = torch.arange(ROW_SAMPLES, device=log_mel.device)
        self._frames = torch.arange(WINDOW_FRAMES, device=log_mel.device)

    def __call__(self, pcm: Tensor, marks: Tensor) -> Tensor:
        """Features of a batch, float32 [B, n_mels, 3000].

        pcm: int16 [B, ROW_SAMPLES]; values behind a window's own samples are ignored. marks: int32
        [B, N_MARKS], rows of `marks_of`; the last column has the bits of a float32.
        """
        n_samples, first, n_frames, is_slice, bits = marks.unbind(1)
        sliced = is_slice.bool()[:, None]
        x = pcm.float() / INT16_SCALE
        x = x.where(self._samples < n_samples[:, None], x.new_zeros(()))
        log_mel = self._log_mel.log_power(_with_edges(x, sliced))  # [B, mels, 3002]
        index = (first[:, None] + self._frames)[:, None].expand(-1, log_mel.shape[1], -1)
        own = log_mel.gather(2, index.long())  # [B, mels, 3000]
        peak = torch.where(sliced[:, 0], bits.view(torch.float32), own.amax((1, 2)))
        heard = (self._frames < n_frames[:, None])[:, None]
        return scaled(own, peak).where(heard, own.new_zeros(()))


def _with_edges(x: Tensor, sliced: Tensor) -> Tensor:
    """Prepend each window's reflected start; reflect the end of windows that are no slices.

    x [B, ROW_SAMPLES], sliced bool [B, 1]; returns [B, 200 + ROW_SAMPLES].
    """
    start = x[:, 1 : _HALF + 1].flip(1)
    own, behind = x[:, :WINDOW_SAMPLES], x[:, WINDOW_SAMPLES:]
    end = own[:, -_HALF - 1 : -1].flip(1)
    mirrored = torch.nn.functional.pad(end, (0, behind.shape[1] - _HALF))
    return torch.cat((start, own, behind.where(sliced, mirrored)), 1)
