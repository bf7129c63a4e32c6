"""Reads an uploaded file as 16 kHz mono int16 PCM, block by block, with PyAV.

Uploads may be hostile: only the demuxer that the content names and audio decoders may open, a file
can reach no protocol, and the limits on seconds and bytes hold while decoding.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet

from cluster.common.errors import InvalidAudioError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.channels import one_channel, planes_of, scaled
from router.audio.containers import Container, sniff
from router.audio.protocol import AudioLimits, too_large

SUPPORTED = ("flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "opus", "wav", "webm")
PCM_FORMATS = ("s16le", "s16be", "s24le", "s24be", "s32le", "s32be", "f32le", "f32be", "f64le")
DECODERS = frozenset(
    (
        *("aac", "alac", "flac", "mp1", "mp1float", "mp2", "mp2float", "mp3", "mp3float"),
        *("opus", "vorbis", "ac3", "eac3", "amrnb", "amrwb", "gsm_ms"),
        *("adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt"),
        *("pcm_u8", "pcm_s8", "pcm_alaw", "pcm_mulaw", "pcm_f64be"),
        *(f"pcm_{form}" for form in PCM_FORMATS),
    )
)
FALLBACK_DEMUXERS = "mp3,aac"  # these may begin anywhere, not only at byte 0
COUNTED = frozenset((Container.FLAC, Container.MOV))  # whose whole files hold what they declare
SIZED = frozenset((Container.FLAC, Container.MOV, Container.MATROSKA, Container.WAV))

MIN_RATE, MAX_RATE = 4_000, 384_000  # Hz; a forged rate would stretch seconds to days
MAX_CHANNELS = 32
MAX_VALUES_PER_S = 48_000 * 2  # decoded samples of all channels, per second of the longest audio
LENGTH_SLACK_S = 0.1  # by which a file may exceed the limit, as encoders pad
# By which a whole file may end before its declared length. Edit lists and encoders round it to
# frames, which last up to 0.26 s (AAC at 4 kHz).
END_SLACK_S = 0.5
BAD_PACKETS, BAD_SHARE = 8, 0.1  # tolerated: a few, and then a tenth of all
READ_BYTES = 65_536
PACKET_BYTES = 32_768


class AudioFile:
    """`declared_s` is the length in seconds that the container states, if any. It may lie."""

    def __init__(self, path: Path, limits: AudioLimits) -> None:
        """Raises AudioTooShortError, PayloadTooLargeError or InvalidAudioError."""
        self._limits = limits
        self._file = path.open("rb")
        self._container: InputContainer | None = None
        try:
            size = os.fstat(self._file.fileno()).st_size
            self._check_size(size)
            self._kind, start = sniff(self._file)
            self._container = _open_container(_Content(self._file, start), self._kind)
            self._stream = _audio_stream(self._container)
            self.declared_s = self._declared_s(size)
            if (self.declared_s or 0) > limits.max_audio_s + 1:
                if self._kind in SIZED:
                    raise limits.too_long()
                self.declared_s = None  # damaged time stamps say days; decoding finds out
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
        self._file.close()

    def blocks(self, channel: int | None = None) -> Iterator[Pcm]:
        """Yield int16 [n_samples] pieces of about half a second. Raises as `frames`.
        channel: None: the mix of all.
        """
        converter = Converter(channel)
        for frame in self.frames():
            yield from converter.convert(frame)
        yield from converter.flush()

    def frames(self) -> Iterator[AudioFrame]:
        """Decode, skipping damaged packets. Raises InvalidAudioError or AudioTooShortError."""
        packets = bad = values = 0
        decoded_s, end_s, limits = 0.0, 0.0, self._limits
        for packet in self._packets():
            packets += 1
            if packet.pts is not None:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            try:
                frames = self._stream.decode(packet)
            except av.error.FFmpegError as error:
                raise_if_out_of_memory(error)
                bad += 1
                if bad > BAD_PACKETS and bad > BAD_SHARE * packets:
                    raise InvalidAudioError(
                        "The audio is damaged: too much of it cannot be decoded.", param="file"
                    ) from error
                continue
            for frame in frames:
                _check_frame(frame)
                values += frame.samples * frame.layout.nb_channels
                decoded_s += frame.samples / frame.sample_rate
                is_long = decoded_s > limits.max_audio_s + LENGTH_SLACK_S
                if is_long or values > limits.max_audio_s * MAX_VALUES_PER_S:
                    raise limits.too_long()
                yield frame
        if bad and decoded_s == 0.0:
            raise _unsupported()
        # In an MP4 file time may pass without sound; a gap in a FLAC file is damage.
        held_s = end_s if self._kind is Container.MOV else decoded_s
        if self._kind in COUNTED and (self.declared_s or 0) > held_s + END_SLACK_S:
            raise _truncated(f"it states {self.declared_s:.1f} s and holds {held_s:.1f} s")
        if decoded_s == 0.0 or round(decoded_s, 6) < limits.min_audio_s:
            raise limits.too_short()

    def _packets(self) -> Iterator[Packet[AudioStream]]:
        assert self._container is not None
        try:
            yield from self._container.demux(self._stream)
        except av.error.FFmpegError as error:
            raise_if_out_of_memory(error)
            raise _truncated("reading stopped before its end") from error

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_upload_bytes:
            raise too_large(self._limits.max_upload_bytes, size)
        if size == 0:
            raise self._limits.too_short()

    def _declared_s(self, size: int) -> float | None:
        assert self._container is not None
        stream, container = self._stream, self._container
        seconds = 0.0
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            seconds = container.duration / 1_000_000  # AV_TIME_BASE
        if self._kind is Container.WAV and (bit_rate := stream.codec_context.bit_rate):
            seconds = min(seconds or size, size * 8 / bit_rate)  # a header written to a pipe lies
        return seconds if seconds > 0 else None


class _Content:
    """The bytes from `start` on, for libav. It gets no file name, and so no extension."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self.read = file.read
        self._file = file
        self._start = start
        file.seek(start)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            offset += self._start
        return self._file.seek(offset, whence) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start


def _open_container(file: _Content, kind: Container | None) -> InputContainer:
    options = {
        "format_whitelist": kind.value if kind else FALLBACK_DEMUXERS,
        "codec_whitelist": ",".join(sorted(DECODERS)),
        "protocol_whitelist": "none",
        "probesize": "1000000",
    }
    if kind is Container.WAV:
        options["probesize"] = "32"  # the header is enough; guessing costs 20 ms
        options["max_size"] = str(PACKET_BYTES)  # by default 1,024 samples
    try:
        return av.open(
            file,
            "r",
            format=kind and kind.value,
            options=options,
            metadata_errors="replace",
            buffer_size=READ_BYTES,
        )
    except (av.error.FFmpegError, ValueError) as error:
        raise_if_out_of_memory(error)
        raise _unsupported() from error


def _audio_stream(container: InputContainer) -> AudioStream:
    stream = container.streams.best("audio")
    if not isinstance(stream, AudioStream):
        raise InvalidAudioError("The file holds no sound.", param="file")
    context = stream.codec_context
    if context is None:  # libav has no decoder for it, and so no name
        raise InvalidAudioError("The audio codec is not supported.", param="file")
    if context.name not in DECODERS:
        raise InvalidAudioError(f"The audio codec {context.name} is not supported.", param="file")
    context.thread_count = 1
    return stream


def _check_frame(frame: AudioFrame) -> None:
    rate, channels = frame.sample_rate, frame.layout.nb_channels
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidAudioError(
            f"The sample rate is {rate} Hz; it must be from {MIN_RATE} to {MAX_RATE} Hz.",
            param="file",
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidAudioError(
            f"The audio has {channels} channels; at most {MAX_CHANNELS} are allowed.", param="file"
        )


def _unsupported() -> InvalidAudioError:
    return InvalidAudioError(f"Invalid file format. Supported formats: {list(SUPPORTED)}")


def _truncated(how: str) -> InvalidAudioError:
    return InvalidAudioError(
        f"The file is truncated: {how}. Send the whole file again.",
        param="file",
        code="audio_truncated",
    )


BLOCK_S = 0.5  # resampled and yielded at a time: fits the cache


class Converter:
    """Resamples one file's frames, in blocks: a call costs more than a sample."""

    def __init__(self, channel: int | None = None) -> None:
        self._channel = channel
        self._format: tuple[str, str, int] | None = None
        self._fifo = AudioFifo()
        self._resampler: AudioResampler | None = None

    def convert(self, frame: AudioFrame) -> Iterator[Pcm]:
        if self._channel is not None:
            frame = one_channel(frame, self._channel)
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
    """The mean of channels without a layout, as float mono. libav cannot mix these."""
    planes = planes_of(frame)
    mono = scaled(planes.mean(axis=0, dtype=np.float32), planes.dtype)
    mixed = AudioFrame.from_ndarray(mono[None], format="flt", layout="mono")
    mixed.sample_rate = frame.sample_rate
    return mixed


def raise_if_out_of_memory(error: BaseException) -> None:
    if getattr(error, "errno", None) == errno.ENOMEM:
        raise MemoryError from error
