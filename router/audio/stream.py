"""The windows of one upload, as they are read: an asynchronous iterator with a length."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE
from router.api.params import Chunking
from router.audio.protocol import Failed, Finished, Opened, OpenUpload, UploadReport, WindowFound
from router.audio.windows import Window

CREDIT = 2  # windows of one upload that may wait in the router for their consumer


class AudioStream:
    """One upload's windows, in order, as they are found.

    expected_s: the length that the container states, or None; it may be wrong.
    duration_s, decode_s: the audio's length, and the processor time that decoding and cutting
        took; both are final when the iteration has ended.
    log_max: the largest log10 mel power of an upload that is read whole, when the iteration has
        ended. `n_mels`, `chunking` and `early` are as in `router.audio.protocol.OpenUpload`.

    The methods below `__anext__` are called by the pool and its workers.
    """

    def __init__(
        self,
        upload_id: int,
        path: Path,
        request_id: str,
        *,
        n_mels: int | None = None,
        chunking: Chunking | None = None,
        early: bool = False,
    ) -> None:
        self.upload_id = upload_id
        self.request_id = request_id
        self.expected_s: float | None = None
        self.duration_s = 0.0
        self.decode_s = 0.0
        self.log_max = 0.0
        self.n_received = 0  # windows
        self.moves = 0  # to another worker, since the first
        self.add_credit: Callable[[], None] | None = None  # set by the worker that has the upload
        self.finished = False
        self._path = path
        self._n_mels = n_mels
        self._chunking = chunking
        self._early = early
        self._waiting: deque[Window] = deque()
        self._opened = False
        self._error: SplitscribeError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """The next window.

        Raises:
            SplitscribeError: the upload cannot be decoded, or its worker died on it.
        """
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
        while not self._opened and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        return self.finished or self._error is not None

    @property
    def wants_work(self) -> bool:
        return not self.ended and len(self._waiting) < CREDIT

    def opening(self) -> OpenUpload:
        """What a worker is asked for: the windows that have not come yet."""
        return OpenUpload(
            upload_id=self.upload_id,
            path=str(self._path),
            credit=CREDIT - len(self._waiting),
            skip=self.n_received,
            n_mels=self._n_mels,
            chunking=self._chunking,
            early=self._early,
        )

    def take(self, report: UploadReport, pcm: bytes) -> None:
        """Take what the worker reports; `pcm` is that of a window."""
        self.decode_s = report.busy_s
        match report.event:
            case Opened(expected_s):
                self._opened = True
                self.expected_s = expected_s
            case WindowFound(index, start_sample, is_faint, speech):
                samples = np.frombuffer(pcm, np.int16)
                self._waiting.append(Window(index, start_sample, samples, is_faint, speech))
                self.n_received += 1
            case Finished(n_samples, log_max):
                self.finished = True
                self.duration_s = n_samples / SAMPLE_RATE
                self.log_max = log_max
            case Failed() as failure:
                self._error = failure.as_error()
        self._changed.set()

    def fail(self, error: SplitscribeError) -> None:
        if not self.ended:
            self._error = error
            self._changed.set()
