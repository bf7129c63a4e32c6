"""The router's view of an upload: window by window, or whole and in any order."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from cluster.common.errors import DeadlineExceededError, OverloadedError, SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.protocol import (
    Failed,
    Finished,
    Opened,
    OpenUpload,
    UploadReport,
    WindowFound,
)
from router.audio.windows import Window
from router.interface import RequestContext

CREDIT = 2  # windows of one upload that may wait in the router for their consumer
RETRY_AFTER_S = 10.0  # after a full disk
SAMPLE_BYTES = 2


class AudioStream:
    """Iterates over an upload's windows, after which `result` is complete."""

    def __init__(self, upload: OpenUpload, context: RequestContext) -> None:
        self.upload_id = upload.upload_id
        self.context = context
        self.expected_s: float | None = None
        self.decode_s = 0.0  # processor time so far
        self.result = Finished(0)
        self.n_received = 0  # windows
        self.path = Path(upload.path)
        self.audio = upload.path, upload.channel
        self.is_long = False  # set by the pool
        self.moves = 0  # away from workers that it may have ended
        self.add_credit: Callable[[], None] | None = None  # set by the worker that has the upload
        self.finished = False
        self._upload = upload
        self._waiting: deque[Window] = deque()
        self._opened = False
        self._error: SplitscribeError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """Raises SplitscribeError if it cannot be decoded, or if its worker died on it."""
        while True:
            if self._error is not None:
                raise self._error
            if self._waiting:
                break
            if self.finished:
                raise StopAsyncIteration
            await self._change()
        window = self._waiting.popleft()
        if self.add_credit is not None and not self.finished:
            self.add_credit()
        return window

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def until_open(self) -> None:
        """Raises as `__anext__`, and DeadlineExceededError if no worker opened it in time."""
        while not self._opened and self._error is None:
            try:
                async with asyncio.timeout(self.context.remaining_s()):
                    await self._change()
            except TimeoutError as error:
                if self.context.remaining_s() <= 0:  # else windows have ended meanwhile
                    raise DeadlineExceededError("no audio worker was free in time") from error
        if self._error is not None:
            raise self._error

    @property
    def duration_s(self) -> float:
        return self.result.n_samples / SAMPLE_RATE

    @property
    def ended(self) -> bool:
        return self.finished or self._error is not None

    @property
    def is_search(self) -> bool:
        """Whether it is a search for speakers, which is not blamed for the death of its worker."""
        return self._upload.speakers is not None

    @property
    def wants_work(self) -> bool:
        return not self.ended and len(self._waiting) < CREDIT

    def opening(self) -> OpenUpload:
        credit = CREDIT - len(self._waiting)
        return replace(self._upload, credit=credit, skip=self.n_received)

    def take(self, report: UploadReport, pcm: bytes) -> None:
        self.decode_s = report.busy_s
        match report.event:
            case Opened(expected_s):
                self._opened = True
                self.expected_s = expected_s
            case WindowFound(index, start_sample, is_faint, speech):
                samples = np.frombuffer(pcm, np.int16)
                self._waiting.append(Window(index, start_sample, samples, is_faint, speech))
                self.n_received += 1
            case Finished() as result:
                self.finished, self.result = True, result
            case Failed() as failure:
                self._error = failure.as_error()
        self._changed.set()

    def fail(self, error: SplitscribeError) -> None:
        if not self.ended:
            self._error = error
            self._changed.set()


class WholeAudio(AudioStream):
    """One upload's samples, to be read in any order after `load`.

    They are in a temporary file without a name, which takes no memory and is gone when the process
    ends. `close` waits for threads that use the file, since its descriptor may be reused.
    """

    def __init__(self, upload: OpenUpload, context: RequestContext) -> None:
        super().__init__(upload, context)
        self.n_samples = 0
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see close
        self._lock = threading.Lock()

    async def load(self, on_found: Callable[[float], None]) -> None:
        """Decode to the end. `on_found` gets the seconds of audio so far, and may raise. Raises as
        `__anext__`, and OverloadedError if the disk is full.
        """
        async for piece in self:
            try:
                await asyncio.to_thread(self._write, piece.pcm)
            except OSError as error:
                raise OverloadedError(
                    "The server has no room for the audio now. Please try again shortly.",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            self.n_samples += piece.n_samples
            on_found(self.n_samples / SAMPLE_RATE)

    async def read(self, start: int, stop: int) -> Pcm:
        return await asyncio.to_thread(self._read, start, stop)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, pcm: Pcm) -> None:
        view, at = pcm.data.cast("B"), self.n_samples * SAMPLE_BYTES
        with self._lock:
            while view and not self._file.closed:
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written

    def _read(self, start: int, stop: int) -> Pcm:
        with self._lock:
            if self._file.closed or not self.n_samples:
                return np.empty(0, np.int16)
            return np.array(np.memmap(self._file, np.int16, "r")[start:stop])
