"""The windows of one upload, as the pipeline sees them: an asynchronous iterator with a length."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from cluster.errors import SplitscribeError
from cluster.messages import SAMPLE_RATE
from router.api.params import Chunking
from router.audio.protocol import Message, error_from_message
from router.audio.windows import Window

CREDIT = 2  # windows of one upload that may wait in the router for their consumer


class StreamWorker(Protocol):
    """The worker that has a stream, as the stream sees it: `router.audio.process.AudioProcess`."""

    def send(self, message: Message) -> None: ...

    def drop(self, stream: AudioStream) -> None: ...


class AudioStream:
    """One upload's windows, in order, as they are found.

    expected_s: the length that the container states, or None; it may be wrong.
    duration_s, decode_s: the audio's length, and the processor time that decoding and cutting
        took; both are final when the iteration has ended.
    n_mels: None for windows cut at pauses; else the upload comes whole, in pieces of 30 s, and
        `log_max` is its largest log10 mel power in so many bins, when the iteration has ended.
    chunking: a client's wishes for the cuts.

    The rest is between the pool and its workers.
    """

    def __init__(
        self,
        job: int,
        path: Path,
        request_id: str,
        *,
        n_mels: int | None = None,
        chunking: Chunking | None = None,
    ) -> None:
        self.request_id = request_id
        self.n_mels = n_mels
        self.chunking = chunking
        self.expected_s: float | None = None
        self.duration_s = 0.0
        self.decode_s = 0.0
        self.log_max = 0.0
        self.job = job
        self.path = path
        self.worker: StreamWorker | None = None
        self.waiting: deque[Window] = deque()
        self.received = 0  # windows, in all
        self.moves = 0
        self.opened = False
        self.finished = False
        self.error: SplitscribeError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """The next window.

        Raises:
            SplitscribeError: the upload cannot be decoded, or its worker died on it.
        """
        while True:
            if self.error is not None:
                raise self.error
            if self.waiting:
                break
            if self.finished:
                raise StopAsyncIteration
            await self._change()
        window = self.waiting.popleft()
        if self.worker is not None and not self.finished:
            self.worker.send({"kind": "credit", "job": self.job, "windows": 1})
        return window

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def until_open(self) -> None:
        while not self.opened:
            if self.error is not None:
                raise self.error
            await self._change()
        if self.error is not None:
            raise self.error

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    @property
    def wants_work(self) -> bool:
        return not self.ended and len(self.waiting) < CREDIT

    def take(self, message: Message, pcm: bytes) -> None:
        kind = message["kind"]
        if kind == "opened":
            self.opened = True
            self.expected_s = message["expected_s"]
        elif kind == "window":
            samples = np.frombuffer(pcm, np.int16)
            self.waiting.append(
                Window(
                    message["index"],
                    message["start_sample"],
                    samples,
                    message["is_faint"],
                    _spans(message["speech"]),
                )
            )
            self.received += 1
        elif kind == "done":
            self.finished = True
            self.duration_s = message["n_samples"] / SAMPLE_RATE
            self.log_max = message.get("log_max", self.log_max)
        elif kind == "failed":
            self.error = error_from_message(message)
        self.decode_s = message.get("busy_s", self.decode_s)
        self._changed.set()

    def fail(self, error: SplitscribeError) -> None:
        if not self.ended:
            self.error = error
            self._changed.set()


def _spans(found: list[list[int]] | None) -> tuple[tuple[int, int], ...] | None:
    return None if found is None else tuple((first, last) for first, last in found)
