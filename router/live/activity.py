"""Voice activity of all live sessions of a process together: one model call for each 32 ms.

Each session has a `SpeechTrack`, which takes PCM of any length and tells the probability of speech
of each frame of 512 samples. A tick takes the frames that are due of every track and runs them
through Silero's network in one batch, off the event loop; a track keeps its row of the network's
state. The file is another export of the one that `router.audio.vad` uses, with a batch in place of
a sequence; both give the same probabilities.

Knows frames and probabilities; `router.live.listener` decides what to make of them.
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
TICK_S = 0.05  # between two batches: what is added to the delay of words, at most
MAX_FRAMES = 96  # of one track in a tick, 3 s, so that a pushed file does not hold up the others
STATE_WIDTH = 128

Probabilities = NDArray[np.float32]
Heard = Callable[[Probabilities], None]
Run = Callable[[Callable[[], None]], Awaitable[None]]  # runs work, perhaps on a thread


class ActivityModel(Protocol):
    """A recurrent network over frames, for several streams at once."""

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
    """Silero's network with a batch; loaded with the first frame, since most routers have none."""

    def __init__(self) -> None:
        """Raises ConfigurationError where the package `silero-vad` lacks the file."""
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
        import onnxruntime  # not at the top: a router without live sessions has no use for it

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors: the model's export left warnings
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(
            str(self._path), options, providers=["CPUExecutionProvider"]
        )


class SpeechTrack:
    """One session's audio on its way through the network."""

    __slots__ = ("_heard", "_options", "_peak", "_tail", "_waiting", "state")

    def __init__(self, heard: Heard, options: VadOptions) -> None:
        self._heard = heard
        self._options = options
        self._peak = 0.0
        self._tail: Pcm = np.zeros(CONTEXT_SAMPLES, np.int16)  # context, then a begun frame
        self._waiting: deque[Pcm] = deque()  # [CONTEXT_SAMPLES + FRAME_SAMPLES] each
        self.state = np.zeros((2, STATE_WIDTH), np.float32)

    def feed(self, pcm: Pcm) -> None:
        """Take int16 [n_samples]; frames are complete with 512 of them."""
        joined = np.concatenate((self._tail, pcm))
        n_frames = (joined.shape[0] - CONTEXT_SAMPLES) // FRAME_SAMPLES
        for frame in range(n_frames):
            start = frame * FRAME_SAMPLES
            self._waiting.append(joined[start : start + CONTEXT_SAMPLES + FRAME_SAMPLES])
        self._tail = joined[n_frames * FRAME_SAMPLES :].copy()

    @property
    def n_waiting(self) -> int:
        """Whole frames that no tick has taken."""
        return len(self._waiting)

    def take(self, n_frames: int) -> list[Pcm]:
        return [self._waiting.popleft() for _ in range(min(n_frames, len(self._waiting)))]

    def scaled(self, frame: Pcm) -> NDArray[np.float32] | None:
        """The frame for the network, quiet audio amplified; None for one that is silent."""
        options = self._options
        peak = max(int(frame.max()), -int(frame.min()))
        self._peak = max(peak, PEAK_DECAY * self._peak)
        if peak <= options.silence_peak:
            return None
        gain = min(max(options.target_peak / (PCM_SCALE * self._peak), 1.0), options.max_gain)
        return frame.astype(np.float32) * np.float32(PCM_SCALE * gain)

    def tell(self, probabilities: Probabilities) -> None:
        self._heard(probabilities)


class VoiceActivity:
    """All tracks of a process, and the task that runs their frames in batches."""

    def __init__(
        self,
        model: ActivityModel,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        run: Run | None = None,
        options: VadOptions | None = None,
    ) -> None:
        """run: how the network is run; None: on a thread of its own."""
        self._model = model
        self._sleep = sleep
        self._options = options or VadOptions()
        self._tracks: set[SpeechTrack] = set()
        self._fed = asyncio.Event()
        self._threads = None if run else ThreadPoolExecutor(1, "voice-activity")
        self._run = run or self._on_thread
        self._ticking: asyncio.Task[None] | None = None

    def track(self, heard: Heard) -> SpeechTrack:
        """Begin a track; `heard` is called in the event loop with float32 [n_frames], in order."""
        track = SpeechTrack(heard, self._options)
        self._tracks.add(track)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick_on())
        return track

    def feed(self, track: SpeechTrack, pcm: Pcm) -> None:
        track.feed(pcm)
        if track.n_waiting:
            self._fed.set()

    def end(self, track: SpeechTrack) -> None:
        """Forget a track; it is told nothing more."""
        self._tracks.discard(track)

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
            if any(track.n_waiting for track in self._tracks):
                self._fed.set()

    async def _tick(self) -> None:
        due = [(track, track.take(MAX_FRAMES)) for track in self._tracks if track.n_waiting]
        found = [np.zeros(len(frames), np.float32) for _, frames in due]

        def work() -> None:
            for nth in range(max((len(frames) for _, frames in due), default=0)):
                self._step(due, found, nth)

        try:
            await self._run(work)
        except Exception:  # no words are lost: the decoder hears for itself
            logger.exception("voice activity failed; its frames count as speech")
            found = [np.ones(len(frames), np.float32) for _, frames in due]
        for (track, _), probabilities in zip(due, found, strict=True):
            if track not in self._tracks:
                continue
            try:
                track.tell(probabilities)
            except Exception:  # a mistake in one session must not end the hearing of all
                logger.exception("a session could not take its voice activity; it hears no more")
                self.end(track)

    def _step(
        self, due: Sequence[tuple[SpeechTrack, list[Pcm]]], found: list[Probabilities], nth: int
    ) -> None:
        """Run the nth frame of every track that has one; runs on the thread."""
        batch: list[tuple[int, NDArray[np.float32]]] = []
        for index, (track, frames) in enumerate(due):
            if nth < len(frames) and (frame := track.scaled(frames[nth])) is not None:
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
