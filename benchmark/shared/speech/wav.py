"""Synthetic speech as 16 bit samples, and samples as a WAV file."""

import io
import wave

import numpy as np
import numpy.typing as npt

from cluster.common.messages import SAMPLE_RATE


def to_pcm(audio: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Floats in -1..1, (n,), as int16 (n,); what lies outside is clipped."""
    return (np.clip(audio, -1, 1) * 32767).astype(np.int16)


def wav_bytes(pcm: npt.NDArray[np.int16], rate: int = SAMPLE_RATE) -> bytes:
    """A WAV file of int16 (n,), mono, at `rate` Hz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate)
        wav.writeframes(pcm.tobytes())
    return buffer.getvalue()
