"""Decodes a client's audio in one of OpenAI's formats into 16 kHz mono samples.

The resampler keeps its state, so the samples do not depend on how the audio is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import av
import numpy as np
import soxr
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE, Pcm

Encoding = Literal["pcm", "pcmu", "pcma"]

G711_RATE = 8_000
PIECE_S = 10.0  # audio that is resampled at once
# soxr's quality for 16-bit audio. It delays audio by 19 ms, the best quality by 30 ms.
QUALITY = "MQ"


@dataclass(frozen=True, slots=True)
class AudioFormat:
    encoding: Encoding = "pcm"  # int16 little-endian, or G.711 with one byte per sample
    rate: int = 24_000  # Hz

    @property
    def bytes_per_s(self) -> int:
        return self.rate * (2 if self.encoding == "pcm" else 1)


class StreamDecoder:
    def __init__(self, form: AudioFormat) -> None:
        self.form = form
        self._odd = b""  # the first byte of an incomplete sample; `flush` keeps it
        self._resampler = self._new_resampler()

    def decode(self, data: bytes) -> Iterator[Pcm]:
        """Yield the samples, int16 [n] at 16 kHz, at most 10 s at a time."""
        samples = self._samples(data)
        step = round(PIECE_S * self.form.rate)
        for start in range(0, len(samples), step):
            yield from self._resample(samples[start : start + step], last=False)

    def flush(self) -> Iterator[Pcm]:
        """Yield the samples that the resampler still holds, and start a new stream."""
        if self._resampler is not None:
            yield from self._resample(np.zeros(0, np.int16), last=True)
            self._resampler = self._new_resampler()

    def _new_resampler(self) -> soxr.ResampleStream | None:
        if self.form.rate == SAMPLE_RATE:
            return None
        # float32, since soxr adds dither noise to int16, also in silence.
        return soxr.ResampleStream(self.form.rate, SAMPLE_RATE, 1, dtype="float32", quality=QUALITY)

    def _samples(self, data: bytes) -> NDArray[np.int16]:
        if self.form.encoding != "pcm":
            return _law(self.form.encoding)[np.frombuffer(data, np.uint8)]
        data = self._odd + data
        whole = len(data) & ~1
        self._odd = data[whole:]
        return np.frombuffer(data, "<i2", count=whole // 2).astype(np.int16, copy=False)

    def _resample(self, samples: NDArray[np.int16], *, last: bool) -> Iterator[Pcm]:
        if self._resampler is not None:
            resampled = self._resampler.resample_chunk(samples.astype(np.float32), last=last)
            samples = np.clip(np.rint(resampled), -32768, 32767).astype(np.int16)
        if len(samples):
            yield samples


@cache
def _law(encoding: Encoding) -> NDArray[np.int16]:
    """Return the sample of each of the 256 G.711 codes, int16 [256], from FFmpeg's decoder."""
    name = "pcm_mulaw" if encoding == "pcmu" else "pcm_alaw"
    codec: Any = av.CodecContext.create(name, "r")
    codec.sample_rate, codec.layout = G711_RATE, "mono"
    (frame,) = codec.decode(av.Packet(bytes(range(256))))
    samples: NDArray[np.int16] = frame.to_ndarray()[0].astype(np.int16)
    return samples
