"""Runs voice activity detection for all live sessions of a process, with the network of
`router.audio.vad`. Each tick runs the waiting frames of every stream, off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np

from cluster.common.messages import Pcm
from router.audio.vad import FRAME_SAMPLES, Probabilities, SpeechDetector, SpeechStream

logger = logging.getLogger(__name__)

TICK_S = 0.05  # between two ticks; the longest delay that this adds to a word
FRAME_BYTES = 2 * FRAME_SAMPLES
MAX_FRAMES = 96  # of one stream per tick (3 s), so that a fast sender does not delay the others

OnProbabilities = Callable[[Probabilities], None]
Run = Callable[[Callable[[], None]], Awaitable[None]]  # runs a function, perhaps on a thread


class VadStream:
    __slots__ = ("deliver", "network", "waiting")

    def __init__(self, deliver: OnProbabilities) -> None:
        self.deliver = deliver
        self.network: SpeechStream | None = None  # opened by the first tick that has a frame
        self.waiting = bytearray()  # int16; drops its beginning without a copy of the rest

    @property
    def is_due(self) -> bool:
        return len(self.waiting) >= FRAME_BYTES

    def take(self) -> Pcm:
        """Return the frames of one tick, int16 [n_frames, FRAME_SAMPLES]."""
        n_bytes = min(len(self.waiting) // FRAME_BYTES, MAX_FRAMES) * FRAME_BYTES
        taken = np.frombuffer(self.waiting[:n_bytes], np.int16)
        del self.waiting[:n_bytes]
        return taken.reshape(-1, FRAME_SAMPLES)


class VoiceActivity:
    def __init__(
        self,
        make_detector: Callable[[], SpeechDetector] = SpeechDetector,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        run: Run = asyncio.to_thread,
    ) -> None:
        """make_detector: called at the first frame, since few routers need the network."""
        self._make_detector = make_detector
        self._detector: SpeechDetector | None = None
        self._sleep = sleep
        self._streams: set[VadStream] = set()
        self._fed = asyncio.Event()
        self._run = run
        self._ticking: asyncio.Task[None] | None = None

    def open_stream(self, on_probabilities: OnProbabilities) -> VadStream:
        """on_probabilities: called on the event loop with float32 [n_frames]; must not raise."""
        stream = VadStream(on_probabilities)
        self._streams.add(stream)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick_on())
        return stream

    def feed(self, stream: VadStream, pcm: Pcm) -> None:
        stream.waiting += pcm.tobytes()
        if stream.is_due:
            self._fed.set()

    def close_stream(self, stream: VadStream) -> None:
        self._streams.discard(stream)
        stream.waiting.clear()

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])

    async def _tick_on(self) -> None:
        while True:
            await self._fed.wait()
            await self._sleep(TICK_S)
            self._fed.clear()
            await self._tick()
            if any(stream.is_due for stream in self._streams):
                self._fed.set()

    async def _tick(self) -> None:
        due = [(stream, stream.take()) for stream in self._streams if stream.is_due]
        found = [np.ones(len(frames), np.float32) for _, frames in due]

        def work() -> None:
            for (stream, frames), probabilities in zip(due, found, strict=True):
                if stream.network is None:
                    self._detector = self._detector or self._make_detector()
                    stream.network = self._detector.stream()
                probabilities[:] = np.concatenate([stream.network.feed(frame) for frame in frames])

        try:
            await self._run(work)
        except Exception:  # unheard frames count as speech, so that no words are lost
            logger.exception("voice activity detection failed; its frames count as speech")
        for (stream, _), probabilities in zip(due, found, strict=True):
            if stream in self._streams:
                stream.deliver(probabilities)
