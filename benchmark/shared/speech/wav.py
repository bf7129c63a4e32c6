"""Convert synthetic speech to 16-bit samples, and samples to a WAV file."""

import io
import wave

import numpy as np
import numpy.typing as npt

from cluster.common.messages import SAMPLE_RATE


def to_pcm(audio: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Convert floats in -1..1, [n], to int16 [n]; others are clipped."""
    return (np.clip(audio, -1, 1) * 32767).astype(np.int16)


def wav_bytes(pcm: npt.NDArray[np.int16], rate: int = SAMPLE_RATE) -> bytes:
    """Return a WAV file of int16 [n], mono, at `rate` Hz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate)
        wav.writeframes(pcm.tobytes())
    return buffer.getvalue()
