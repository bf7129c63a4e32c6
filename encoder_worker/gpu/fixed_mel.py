"""Log-mel of windows at one fixed shape, all on the device: what a captured graph can hold.

The same function as `encoder_worker.mel.LogMel`, which cuts its work to the longest window of a
batch; here every window is computed over its whole 30 s and what differs from window to window is
a row of a table. Nothing in it depends on values, so nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.messages import HOP_LENGTH, MEL_CONTEXT_SAMPLES, WINDOW_FRAMES, WINDOW_SAMPLES, FileMel
from cluster.model.checkpoint import N_FFT
from encoder_worker.mel import INT16_SCALE, LogMel, scaled

_HALF = N_FFT // 2
_FRAMES = WINDOW_FRAMES + MEL_CONTEXT_SAMPLES // HOP_LENGTH  # 3002: up to two of context in front
ROW_SAMPLES = (_FRAMES - 1) * HOP_LENGTH + N_FFT - _HALF  # 480360: what these frames see
N_MARKS = 5  # int32 columns of a row of marks


def marks_of(n_samples: int, file_mel: FileMel | None) -> tuple[int, int, int, int, float]:
    """A window's row of the table: samples, first frame, frames, is a slice, its file's maximum."""
    if file_mel is None:
        return n_samples, 0, WINDOW_FRAMES, 0, 0.0
    first = file_mel.n_before // HOP_LENGTH
    return n_samples, first, file_mel.n_frames, 1, file_mel.log_max


class FixedLogMel:
    """`FixedLogMel(log_mel)(pcm, marks)`, with the filters and the device of a `LogMel`."""

    def __init__(self, log_mel: LogMel) -> None:
        self._log_mel = log_mel
        self._samples = torch.arange(ROW_SAMPLES, device=log_mel.device)
        self._frames = torch.arange(WINDOW_FRAMES, device=log_mel.device)

    def __call__(self, pcm: Tensor, marks: Tensor) -> Tensor:
        """Features of a batch.

        Args:
            pcm: int16 [B, ROW_SAMPLES]; behind a window's own samples stands anything.
            marks: int32 [B, N_MARKS], rows of `marks_of`, the last column the bits of a float32.

        Returns:
            float32 [B, n_mels, 3000].
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
    """Put the reflection of its start before each window, and of its end behind a whole one.

    x [B, ROW_SAMPLES], sliced bool [B, 1]; returns [B, 200 + ROW_SAMPLES].
    """
    start = x[:, 1 : _HALF + 1].flip(1)
    own, behind = x[:, :WINDOW_SAMPLES], x[:, WINDOW_SAMPLES:]
    end = own[:, -_HALF - 1 : -1].flip(1)
    mirrored = torch.nn.functional.pad(end, (0, behind.shape[1] - _HALF))
    return torch.cat((start, own, behind.where(sliced, mirrored)), 1)
