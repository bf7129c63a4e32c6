"""Sound as it comes: from a microphone, from standard input, or from a file.

Every source gives int16 mono blocks at the rate that is asked for, and ends where the sound does; a
microphone's does not. Knows nothing of what becomes of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import av
import numpy as np

from cluster.cli.transcribe.job import STDIN, Source
from cluster.common.errors import ConfigurationError, InvalidAudioError
from cluster.common.messages import Pcm

BLOCK_S = 0.1  # of a microphone
READ_BYTES = 4096  # of standard input at most: what is there comes at once
QUEUED_BLOCKS = 64  # between the thread that reads and the one that sends

INSTALL = "pip install 'splitscribe[microphone]'"


def open_sound(source: Source, rate: int, stop: threading.Event) -> Iterator[Pcm]:
    """The blocks of a source at `rate` Hz, until it ends or `stop` is set.

    Raises:
        ConfigurationError: there is no microphone, or nothing here that reads one.
        InvalidAudioError: the file or the stream is no audio.
    """
    if source.path is None:
        return _microphone(rate, stop)
    blocks = _raw(source, rate) if source.pcm_rate else _container(source, rate)
    return _until(blocks, stop)


async def blocks_of(source: Source, rate: int, stop: threading.Event) -> AsyncIterator[Pcm]:
    """The same for an event loop: a thread reads, and waits while nobody takes what it has read."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Pcm | Exception | None] = asyncio.Queue(QUEUED_BLOCKS)

    def put(item: Pcm | Exception | None) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def read() -> None:
        try:
            for block in open_sound(source, rate, stop):
                put(block)
            put(None)
        except Exception as error:
            put(error)

    # A daemon: a read of standard input cannot be interrupted, and must not keep the process.
    threading.Thread(target=read, name="sound", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _until(blocks: Iterator[Pcm], stop: threading.Event) -> Iterator[Pcm]:
    for block in blocks:
        if stop.is_set():
            return
        if block.size:
            yield block


def _microphone(rate: int, stop: threading.Event) -> Iterator[Pcm]:
    try:
        import sounddevice
    except ImportError as error:
        raise ConfigurationError(f"the microphone needs sounddevice: {INSTALL}") from error
    except OSError as error:  # the package is there, and the library that it calls is not
        raise ConfigurationError(
            f"the microphone needs PortAudio on this machine: {error}"
        ) from error
    try:
        with sounddevice.RawInputStream(samplerate=rate, channels=1, dtype="int16") as stream:
            while not stop.is_set():
                data, _ = stream.read(round(BLOCK_S * rate))
                yield np.frombuffer(bytes(data), np.int16)
    except sounddevice.PortAudioError as error:
        raise ConfigurationError(f"the microphone cannot be opened: {error}") from error


def _raw(source: Source, rate: int) -> Iterator[Pcm]:
    """Bytes that are samples already; one may be split between two reads."""
    resample = _resampler(rate)
    rest = b""
    for data in _reads(source):
        data = rest + data
        whole = len(data) // 2 * 2
        rest = data[whole:]
        samples = np.frombuffer(data[:whole], "<i2")
        if source.pcm_rate == rate:
            yield samples
        elif whole:
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate = source.pcm_rate
            yield from resample(frame)
    if source.pcm_rate != rate:
        yield from resample(None)


def _container(source: Source, rate: int) -> Iterator[Pcm]:
    resample = _resampler(rate)
    opened: Any = _Unbuffered() if source.path == STDIN else source.path
    try:
        with av.open(opened, buffer_size=READ_BYTES) as container:
            if not container.streams.audio:
                raise InvalidAudioError(f"{source.name} has no audio")
            for frame in container.decode(audio=0):
                yield from resample(frame)
            yield from resample(None)
    except (av.FFmpegError, OSError) as error:
        hint = "; is it raw samples? say --raw" if source.path == STDIN else ""
        raise InvalidAudioError(f"{source.name} cannot be read as audio: {error}{hint}") from error


def _resampler(rate: int) -> Callable[[av.AudioFrame | None], Iterator[Pcm]]:
    """None instead of a frame brings what is left."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)

    def resample(frame: av.AudioFrame | None) -> Iterator[Pcm]:
        for out in resampler.resample(frame):
            yield cast(Pcm, out.to_ndarray()[0])

    return resample


class _Unbuffered:
    """Standard input for PyAV: a read gives what is there, and does not wait for all of it."""

    def read(self, n_bytes: int) -> bytes:
        return os.read(0, n_bytes)


def _reads(source: Source) -> Iterator[bytes]:
    descriptor = 0 if source.path == STDIN else os.open(str(source.path), os.O_RDONLY)
    try:
        while data := os.read(descriptor, READ_BYTES):
            yield data
    finally:
        if descriptor:
            os.close(descriptor)
