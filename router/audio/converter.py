"""Turns decoded frames of any format, rate and layout into 16 kHz mono int16 samples."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import av
import numpy as np
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from cluster.common.errors import InvalidAudioError
from cluster.common.messages import SAMPLE_RATE, Pcm

BLOCK_S = 0.5  # what is resampled, and handed on, at a time: it fits the cache


class Converter:
    """Converts the frames of one file, in order.

    Frames are joined to blocks first: the resampler costs more per call than per sample.
    """

    def __init__(self) -> None:
        self._format: tuple[str, str, int] | None = None
        self._fifo = AudioFifo()
        self._resampler: AudioResampler | None = None

    def convert(self, frame: AudioFrame) -> Iterator[Pcm]:
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if form != self._format:
            yield from self.flush()
            self._format = form
            self._fifo = AudioFifo()
            mono = frame.layout.nb_channels == 1
            plain = mono and frame.format.name == "s16" and frame.sample_rate == SAMPLE_RATE
            self._resampler = None if plain else AudioResampler("s16", "mono", SAMPLE_RATE)
        if frame.layout.nb_channels > 2 and frame.layout.name.endswith(" channels"):
            frame = _averaged(frame)
        frame.pts = None  # the queue counts samples; gaps in time stamps are not filled
        self._fifo.write(frame)
        if self._fifo.samples >= BLOCK_S * frame.sample_rate:
            yield from self._resample(self._fifo.read())

    def flush(self) -> Iterator[Pcm]:
        """Give what is still queued, and the tail inside the resampler."""
        if self._format is None:
            return
        if self._fifo.samples:
            yield from self._resample(self._fifo.read())
        if self._resampler is not None:
            yield from self._resample(None)
        self._format = None

    def _resample(self, frame: AudioFrame | None) -> Iterator[Pcm]:
        if self._resampler is None:
            frames = [] if frame is None else [frame]
        else:
            try:
                frames = self._resampler.resample(frame)
            except av.error.FFmpegError as error:
                raise_if_out_of_memory(error)
                raise InvalidAudioError(
                    f"The channel layout of this audio is not supported: {self._format}",
                    param="file",
                ) from error
        for piece in frames:
            yield piece.to_ndarray()[0]


def _averaged(frame: AudioFrame) -> AudioFrame:
    """Mix channels of unknown places, which libav cannot: float mono, their mean."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T  # [channel, n]
    mono = samples.mean(axis=0, dtype=np.float32)
    if samples.dtype == np.uint8:
        mono = (mono - 128) / 128
    elif samples.dtype.kind == "i":
        mono /= float(1 << 8 * samples.dtype.itemsize - 1)
    mixed = AudioFrame.from_ndarray(mono[None].astype(np.float32), format="flt", layout="mono")
    mixed.sample_rate = frame.sample_rate
    return mixed


def raise_if_out_of_memory(error: BaseException) -> None:
    """Raise MemoryError where that is what libav's error means."""
    if getattr(error, "errno", None) == errno.ENOMEM:
        raise MemoryError from error
