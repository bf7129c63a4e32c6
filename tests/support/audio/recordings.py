"""The package's recordings as audio that was never sent before, with the same text."""

from __future__ import annotations

import numpy as np

from benchmark.shared.speech.wav import wav_bytes
from tests.support.audio.speech import pcm_of


def lengthened(name: str, n_samples: int) -> bytes:
    """As a WAV, with samples of silence behind: other audio of the same features."""
    return wav_bytes(np.append(pcm_of(name), np.zeros(n_samples, np.int16)))


def delayed(name: str, n_samples: int) -> bytes:
    """A recording as a WAV with so many samples of silence before it: every window is new."""
    return wav_bytes(np.append(np.zeros(n_samples, np.int16), pcm_of(name)))
