"""Decodes a client's audio: bytes in one of OpenAI's formats become 16 kHz mono samples. soxr keeps
its state, so that pieces of any length give the samples that the whole audio would give.
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
PIECE_S = 10.0  # seconds of audio that are resampled at once
# soxr's quality for 16-bit audio. It delays audio by 19 ms, soxr's best quality by 30 ms.
QUALITY = "MQ"


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """A format of mono audio."""

    encoding: Encoding = "pcm"  # int16 little-endian, or G.711's, a byte for each sample
    rate: int = 24_000  # Hz

    @property
    def bytes_per_s(self) -> int:
        return self.rate * (2 if self.encoding == "pcm" else 1)


class StreamDecoder:
    def __init__(self, form: AudioFormat) -> None:
        self.form = form
        self._odd = b""  # a sample's first byte, before its second: `flush` keeps it
        self._resampler = self._new_resampler()

    def decode(self, data: bytes) -> Iterator[Pcm]:
        """The samples of the bytes that follow, int16 [n] at 16 kHz, at most 10 s at a time."""
        samples = self._samples(data)
        step = round(PIECE_S * self.form.rate)
        for start in range(0, len(samples), step):
            yield from self._resample(samples[start : start + step], last=False)

    def flush(self) -> Iterator[Pcm]:
        """The last samples, which the resampler still holds. Then a new stream begins."""
        if self._resampler is not None:
            yield from self._resample(np.zeros(0, np.int16), last=True)
            self._resampler = self._new_resampler()

    def _new_resampler(self) -> soxr.ResampleStream | None:
        if self.form.rate == SAMPLE_RATE:
            return None
        # With int16, soxr adds dither noise, and silence would no longer be silent.
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
    """For each of the 256 codes of G.711, int16 [256], from FFmpeg's decoder."""
    name = "pcm_mulaw" if encoding == "pcmu" else "pcm_alaw"
    codec: Any = av.CodecContext.create(name, "r")
    codec.sample_rate, codec.layout = G711_RATE, "mono"
    (frame,) = codec.decode(av.Packet(bytes(range(256))))
    samples: NDArray[np.int16] = frame.to_ndarray()[0].astype(np.int16)
    return samples
