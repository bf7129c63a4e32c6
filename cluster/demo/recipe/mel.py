"""Log-mel of Whisper's feature extractor, batched in torch, before and after normalisation.

Knows audio and the extractor's constants. The normalisation takes the maximum of a whole window,
so it is a step of its own: noise and padding must be in the window by then.
"""

from functools import cache

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

N_FFT = 400
HOP = 160
SAMPLE_RATE = 16_000
N_SAMPLES = 480_000  # 30 s


@cache
def _filters(n_mels: int) -> Tensor:
    bank = mel_filter_bank(
        num_frequency_bins=1 + N_FFT // 2,
        num_mel_filters=n_mels,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank).float().T.contiguous()


def log_mel(audio: Tensor, n_mels: int = 80) -> Tensor:
    """Logarithm of the mel power, not yet normalised.

    audio: float32 (batch, n), n a multiple of 160, full scale 1.
    Returns float32 (batch, n_mels, n / 160).
    """
    window = torch.hann_window(N_FFT)
    spectrum = torch.stft(audio, N_FFT, HOP, window=window, return_complex=True)
    power = spectrum[..., :-1].abs().square()
    return (_filters(n_mels) @ power).clamp(min=1e-10).log10()


def normalize(log_spectrum: Tensor) -> Tensor:
    """Whisper's range: 8 decades below each window's maximum are the floor."""
    top = log_spectrum.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(log_spectrum, top - 8.0) + 4.0) / 4.0
