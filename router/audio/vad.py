"""Voice activity detection: the probability of speech in each 32 ms, by Silero's ONNX model.

The model takes any number of frames per call and returns its LSTM state, so streams are fed in
blocks. The package `silero-vad` is located but not imported, since that would load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.common.errors import ConfigurationError
from cluster.common.messages import Pcm

FRAME_SAMPLES = 512  # 32 ms at 16 kHz, what the model was trained on
BLOCK_SAMPLES = 64 * FRAME_SAMPLES  # 2.048 s: one call of the model
CONTEXT_SAMPLES = 64  # of the previous frame, put before each frame
STATE_SHAPE = (1, 1, 128)
MODEL_FILE = "silero_vad_16k_sequence.onnx"
PCM_SCALE = 1 / 32768  # int16 to [-1, 1)
PEAK_DECAY = 0.8 ** (1 / 64)  # per frame: after a loud moment the gain stays low for seconds

Probabilities = NDArray[np.float32]  # [n_frames]
Feed = Callable[[Pcm], Probabilities]  # see `SpeechStream.feed`


@dataclass(frozen=True, slots=True)
class VadOptions:
    """When a frame counts as speech. The defaults favour false speech over lost words, and amplify
    quiet audio for the detector, which otherwise misses its first words.
    """

    threshold: float = 0.3  # a frame at or above it is speech
    release: float = 0.1  # so is one at or above this that touches speech
    min_speech_frames: int = 2  # a shorter run is a click
    sure: float = 0.5  # speech is sure with `min_sure_frames` at or above this
    min_sure_frames: int = 4
    silence_peak: int = 8  # blocks within it are not given to the model
    target_peak: float = 0.4
    max_gain: float = 32.0


class SpeechDetector:
    """The model, loaded once per process and shared by all streams."""

    def __init__(self) -> None:
        self.options = VadOptions()
        self._session = open_network(model_path())

    def stream(self, peak: int = 0) -> SpeechStream:
        """peak: loudest sample of the coming audio, if known."""
        return SpeechStream(self, peak)

    def run(
        self, frames: NDArray[np.float32], h: NDArray[np.float32], c: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """float32 [n, CONTEXT_SAMPLES + FRAME_SAMPLES] to probabilities [n]; h, c: STATE_SHAPE."""
        probabilities, h, c = self._session.run(None, {"input": frames, "h": h, "c": c})
        return probabilities, h, c


class SpeechStream:
    __slots__ = ("_c", "_context", "_detector", "_h", "_peak")

    def __init__(self, detector: SpeechDetector, peak: int = 0) -> None:
        self._detector = detector
        self._peak = float(peak)
        self._h = np.zeros(STATE_SHAPE, np.float32)
        self._c = np.zeros(STATE_SHAPE, np.float32)
        self._context = np.zeros(CONTEXT_SAMPLES, np.int16)

    def feed(self, pcm: Pcm) -> Probabilities:
        """int16 [n] to float32 [ceil(n / FRAME_SAMPLES)]. The last frame is padded."""
        n_frames = -(-pcm.shape[0] // FRAME_SAMPLES)
        padded = np.zeros(CONTEXT_SAMPLES + n_frames * FRAME_SAMPLES, np.int16)
        padded[:CONTEXT_SAMPLES] = self._context
        padded[CONTEXT_SAMPLES : CONTEXT_SAMPLES + pcm.shape[0]] = pcm
        self._context = padded[-CONTEXT_SAMPLES:].copy()
        peak = max(int(padded.max()), -int(padded.min()))
        self._peak = max(peak, PEAK_DECAY**n_frames * self._peak)
        options = self._detector.options
        if peak <= options.silence_peak:
            return np.zeros(n_frames, np.float32)
        gain = options.target_peak / (PCM_SCALE * self._peak)
        signal = padded.astype(np.float32)
        signal *= np.float32(PCM_SCALE * min(max(gain, 1.0), options.max_gain))
        frames: Any = np.lib.stride_tricks.sliding_window_view(
            signal, CONTEXT_SAMPLES + FRAME_SAMPLES
        )[::FRAME_SAMPLES]
        frames = np.ascontiguousarray(frames)
        probabilities, self._h, self._c = self._detector.run(frames, self._h, self._c)
        return probabilities


class SharedStream:
    """One pass of the model, shared by all readers of the same audio."""

    def __init__(self, detector: SpeechDetector, peak: int = 0) -> None:
        self.found: list[Probabilities] = []  # by block
        self._detector = detector
        self._stream = detector.stream(peak)
        self._of_clip: SharedStream | None = None

    def reader(self) -> Feed:
        """Like `feed` of an own stream. All readers must feed the same blocks."""
        places = count()

        def feed(pcm: Pcm) -> Probabilities:
            at = next(places)
            if at == len(self.found):
                self.found.append(self._stream.feed(pcm))
            return self.found[at]

        return feed

    def of_clip(self, peak: int) -> Feed:
        """A reader of a second pass, with the peak of the whole clip."""
        self._of_clip = self._of_clip or SharedStream(self._detector, peak)
        return self._of_clip.reader()


class HeardAudio:
    """A growing buffer of audio, with the probabilities of its first frames."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.pcm: Pcm = np.empty(0, np.int16)
        self.probabilities: Probabilities = np.empty(0, np.float32)  # of the first frames of `pcm`
        self.base = 0  # sample at which `pcm` begins; a multiple of FRAME_SAMPLES
        self.end = 0  # of all samples so far
        self._incoming: list[Pcm] = []  # not in `pcm` yet

    def add(self, pcm: Pcm) -> None:
        self._incoming.append(pcm)
        self.end += pcm.shape[0]

    @property
    def known_end(self) -> int:
        """End of the frames with probabilities, at most a frame past the end."""
        return self.sample(self.probabilities.shape[0])

    def sample(self, frame: int) -> int:
        return self.base + frame * FRAME_SAMPLES

    def join(self) -> Pcm:
        if self._incoming:
            self.pcm = np.concatenate((self.pcm, *self._incoming))
            self._incoming.clear()
        return self.pcm

    def hear(self, least: int) -> Iterator[None]:
        """Run the model while at least `least` samples wait. Yields after each block."""
        while self.end - self.known_end >= least:
            start = self.known_end - self.base
            block = self.join()[start : start + BLOCK_SAMPLES]
            self.probabilities = np.concatenate((self.probabilities, self.feed(block)))
            yield

    def drop(self, n_frames: int) -> None:
        self.pcm = self.pcm[n_frames * FRAME_SAMPLES :]
        self.probabilities = self.probabilities[n_frames:]
        self.base += n_frames * FRAME_SAMPLES


def speech_mask(probabilities: Probabilities, options: VadOptions) -> NDArray[np.bool_]:
    """bool [n_frames]: runs at or above `release` that reach `threshold` and are long enough, so
    that words keep their soft starts and ends.
    """
    candidate = probabilities >= options.release
    mask = np.zeros(candidate.shape, np.bool_)
    for start, end in runs(candidate):
        loudest = probabilities[start:end].max()
        if loudest >= options.threshold and end - start >= options.min_speech_frames:
            mask[start:end] = True
    return mask


def is_sure(probabilities: Probabilities, options: VadOptions) -> bool:
    n_frames = np.count_nonzero(probabilities >= options.sure)
    return bool(n_frames >= options.min_sure_frames)


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal runs of True as (start, end), end excluded."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def open_network(file: Path) -> Any:
    """An onnxruntime session on one thread: the pool has a process per core."""
    import onnxruntime  # not at the top, since the router imports this module, too

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only: exports leave warnings
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def model_path() -> Path:
    spec = find_spec("silero_vad")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / MODEL_FILE
        if path.is_file():
            return path
    raise ConfigurationError(f"{MODEL_FILE} not found: install the package silero-vad 6.2 or later")
