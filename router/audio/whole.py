"""A whole upload at 16 kHz, for those who do not read it from front to back: sequential mode.

    async with pool.open_whole(path, request_id=..., timeout_s=..., n_mels=80) as audio:
        await audio.load()
        pcm = await audio.read(0, 480_000)

Fills a temporary file without a name from an `AudioStream`, so that hours of audio take no
memory, and nothing is left behind by whatever ends the process. Knows nothing of windows.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.common.errors import OverloadedError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.stream import AudioStream

RETRY_AFTER_S = 10.0  # after a full disk
SAMPLE_BYTES = 2


class WholeAudio:
    """One upload's samples, to be read in any order once `load` has ended.

    expected_s: the length that the container states, or None; it may be wrong.
    n_samples, log_max: length, and largest log10 mel power with the edges that openai/whisper
        gives a file; final after `load`.
    decode_s: processor time that decoding took.
    """

    def __init__(self, stream: AudioStream, file: PcmFile, release: Callable[[], None]) -> None:
        self.n_samples = 0
        self.log_max = 0.0
        self._stream = stream
        self._file = file
        self._release = release

    @property
    def expected_s(self) -> float | None:
        return self._stream.expected_s

    @property
    def decode_s(self) -> float:
        return self._stream.decode_s

    @property
    def duration_s(self) -> float:
        return self.n_samples / SAMPLE_RATE

    async def load(self, on_found: Callable[[float], None] | None = None) -> None:
        """Decode to the end; the audio worker is free for others then.

        Args:
            on_found: called with the seconds of audio decoded so far; what it raises ends the load.

        Raises:
            SplitscribeError: the upload cannot be decoded, its worker died on it, or there is no
                room for it on the disk.
        """
        async for piece in self._stream:
            await self._file.append(piece.pcm)
            self.n_samples += piece.n_samples
            if on_found is not None:
                on_found(self.duration_s)
        self.log_max = self._stream.log_max
        self._release()

    async def read(self, start: int, stop: int) -> Pcm:
        """Samples from `start` up to `stop`, or to the end where that comes first."""
        return await self._file.read(start, min(stop, self.n_samples))


class PcmFile:
    """int16 samples in a temporary file without a name.

    Threads use the disk, and a cancelled request does not wait for them. Closing does wait: else
    the descriptor's number could be given to another file while a thread uses it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
        self._lock = threading.Lock()
        self._n_bytes = 0

    async def append(self, pcm: Pcm) -> None:
        """Add samples at the end.

        Raises:
            OverloadedError: the disk is full.
        """
        try:
            await asyncio.to_thread(self._write, pcm)
        except OSError as error:
            raise OverloadedError(
                "The server has no room for the audio now. Please try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    async def read(self, start: int, stop: int) -> Pcm:
        return await asyncio.to_thread(self._read, start, stop)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, pcm: Pcm) -> None:
        view = pcm.data.cast("B")
        with self._lock:
            while view and not self._file.closed:
                written = os.pwrite(self._file.fileno(), view, self._n_bytes)
                self._n_bytes += written
                view = view[written:]

    def _read(self, start: int, stop: int) -> Pcm:
        content = bytearray()
        n_left, at = (stop - start) * SAMPLE_BYTES, start * SAMPLE_BYTES
        with self._lock:
            while n_left > 0 and not self._file.closed:
                piece = os.pread(self._file.fileno(), n_left, at)
                if not piece:
                    break
                content += piece
                n_left, at = n_left - len(piece), at + len(piece)
        return np.frombuffer(content, np.int16)
