"""Voice activity of all live sessions of a process: one batched model call for each VAD frame.

Each session has a `VadStream`, which takes PCM of any length and delivers the probability of speech
of each frame of 512 samples. A tick takes the waiting frames of every stream and runs them through
Silero's network, one frame of each stream in a batch, off the event loop; a stream keeps its row of
the network's state. The model file is another export of the one that `router.audio.vad` uses, with
a batch in place of a sequence; both give the same probabilities.

It knows frames and probabilities; `router.live.turn_detector` decides what follows from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.messages import SAMPLE_RATE, Pcm
from router.audio.vad import (
    CONTEXT_SAMPLES,
    FRAME_SAMPLES,
    PCM_SCALE,
    PEAK_DECAY,
    VadOptions,
    model_path,
)

logger = logging.getLogger(__name__)

MODEL_FILE = "silero_vad_16k_op15.onnx"
TICK_S = 0.05  # from one tick to the next; at most so much is added to the delay of words
MAX_FRAMES = 96  # of one stream in a tick, 3 s: a file sent at once does not delay the others
STATE_WIDTH = 128

Probabilities = NDArray[np.float32]
OnProbabilities = Callable[[Probabilities], None]
Run = Callable[[Callable[[], None]], Awaitable[None]]  # runs a function, perhaps on a thread


class ActivityModel(Protocol):
    """A recurrent network that takes one frame of each of several streams."""

    def run(
        self, frames: NDArray[np.float32], state: NDArray[np.float32]
    ) -> tuple[Probabilities, NDArray[np.float32]]:
        """One step of n streams.

        Args:
            frames: float32 [n, CONTEXT_SAMPLES + FRAME_SAMPLES], in [-1, 1).
            state: float32 [2, n, STATE_WIDTH], zeros at first.

        Returns:
            Probabilities float32 [n], and the new state.
        """


class SileroBatch:
    """Silero's network with a batch. It is loaded with the first frame: few routers need it."""

    def __init__(self) -> None:
        """Raises ConfigurationError if the package `silero-vad` lacks the file."""
        self._path = model_path(MODEL_FILE)
        self._rate = np.array(SAMPLE_RATE, np.int64)
        self._session: Any = None

    def run(
        self, frames: NDArray[np.float32], state: NDArray[np.float32]
    ) -> tuple[Probabilities, NDArray[np.float32]]:
        """See `ActivityModel.run`."""
        if self._session is None:
            self._session = self._load()
        feed = {"input": frames, "state": state, "sr": self._rate}
        probabilities, state = self._session.run(None, feed)
        return probabilities[:, 0], state

    def _load(self) -> Any:
        import onnxruntime  # here, since a router without live sessions does not need it

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only: the exported model causes warnings
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(
            str(self._path), options, providers=["CPUExecutionProvider"]
        )


class VadStream:
    """One session's frames that wait for the network, and the network's state for them."""

    __slots__ = ("_loudest", "_on_probabilities", "_options", "_tail", "_waiting", "state")

    def __init__(self, on_probabilities: OnProbabilities, options: VadOptions) -> None:
        self._on_probabilities = on_probabilities
        self._options = options
        self._loudest = 0.0
        self._tail: Pcm = np.zeros(
            CONTEXT_SAMPLES, np.int16
        )  # the context, then an incomplete frame
        self._waiting: deque[Pcm] = deque()  # [CONTEXT_SAMPLES + FRAME_SAMPLES] each
        self.state = np.zeros((2, STATE_WIDTH), np.float32)

    def feed(self, pcm: Pcm) -> None:
        """Take PCM, int16 [n_samples], of any length."""
        joined = np.concatenate((self._tail, pcm))
        n_frames = (joined.shape[0] - CONTEXT_SAMPLES) // FRAME_SAMPLES
        for frame in range(n_frames):
            start = frame * FRAME_SAMPLES
            self._waiting.append(joined[start : start + CONTEXT_SAMPLES + FRAME_SAMPLES])
        self._tail = joined[n_frames * FRAME_SAMPLES :].copy()

    @property
    def n_waiting(self) -> int:
        """Number of complete frames that no tick has taken."""
        return len(self._waiting)

    def take(self, n_frames: int) -> list[Pcm]:
        return [self._waiting.popleft() for _ in range(min(n_frames, len(self._waiting)))]

    def scaled(self, frame: Pcm) -> NDArray[np.float32] | None:
        """The frame as float32, amplified if it is quiet; None if it is silent."""
        options = self._options
        peak = max(int(frame.max()), -int(frame.min()))
        self._loudest = max(peak, PEAK_DECAY * self._loudest)
        if peak <= options.silence_peak:
            return None
        gain = min(max(options.target_peak / (PCM_SCALE * self._loudest), 1.0), options.max_gain)
        return frame.astype(np.float32) * np.float32(PCM_SCALE * gain)

    def deliver(self, probabilities: Probabilities) -> None:
        self._on_probabilities(probabilities)


class VoiceActivity:
    """The streams of all sessions of a process, and the task that runs their frames in batches."""

    def __init__(
        self,
        model: ActivityModel,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        run: Run | None = None,
        options: VadOptions | None = None,
    ) -> None:
        """run: runs the network; None: on a thread of its own."""
        self._model = model
        self._sleep = sleep
        self._options = options or VadOptions()
        self._streams: set[VadStream] = set()
        self._fed = asyncio.Event()
        self._threads = None if run else ThreadPoolExecutor(1, "voice-activity")
        self._run = run or self._on_thread
        self._ticking: asyncio.Task[None] | None = None

    def open_stream(self, on_probabilities: OnProbabilities) -> VadStream:
        """Begin a stream. `on_probabilities` gets float32 [n_frames], in order, on the loop."""
        stream = VadStream(on_probabilities, self._options)
        self._streams.add(stream)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick_on())
        return stream

    def feed(self, stream: VadStream, pcm: Pcm) -> None:
        stream.feed(pcm)
        if stream.n_waiting:
            self._fed.set()

    def close_stream(self, stream: VadStream) -> None:
        """End a stream; nothing more is delivered to it."""
        self._streams.discard(stream)

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _tick_on(self) -> None:
        while True:
            await self._fed.wait()
            await self._sleep(TICK_S)
            self._fed.clear()
            await self._tick()
            if any(stream.n_waiting for stream in self._streams):
                self._fed.set()

    async def _tick(self) -> None:
        due = [(stream, stream.take(MAX_FRAMES)) for stream in self._streams if stream.n_waiting]
        found = [np.zeros(len(frames), np.float32) for _, frames in due]

        def work() -> None:
            for nth in range(max((len(frames) for _, frames in due), default=0)):
                self._step(due, found, nth)

        try:
            await self._run(work)
        except Exception:  # no words are lost: all of it is decoded as speech
            logger.exception("voice activity detection failed; its frames count as speech")
            found = [np.ones(len(frames), np.float32) for _, frames in due]
        for (stream, _), probabilities in zip(due, found, strict=True):
            if stream not in self._streams:
                continue
            try:
                stream.deliver(probabilities)
            except Exception:  # a mistake in one session must not stop the others
                logger.exception(
                    "a session failed to take its voice activity, and gets no more of it"
                )
                self.close_stream(stream)

    def _step(
        self, due: Sequence[tuple[VadStream, list[Pcm]]], found: list[Probabilities], nth: int
    ) -> None:
        """Run the nth waiting frame of every stream that has one; called on the thread."""
        batch: list[tuple[int, NDArray[np.float32]]] = []
        for index, (stream, frames) in enumerate(due):
            if nth < len(frames) and (frame := stream.scaled(frames[nth])) is not None:
                batch.append((index, frame))
        if not batch:
            return
        state = np.stack([due[index][0].state for index, _ in batch], axis=1)
        probabilities, state = self._model.run(np.stack([frame for _, frame in batch]), state)
        for row, (index, _) in enumerate(batch):
            due[index][0].state = state[:, row].copy()
            found[index][nth] = probabilities[row]

    async def _on_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)
