"""Speaker embedding: vectors of 1.5 s of speech, by an ONNX network over log-mel features.

The network maps 80 log-mel energies [batch, frames, 80] to vectors [batch, size], as WeSpeaker's
ResNet34 and 3D-Speaker's CAM++ do. Runs on one thread of an audio worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.fft import rfft

from cluster.common.errors import ConfigurationError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.vad import open_network

Features = NDArray[np.float32]  # [frames, 80]
Vectors = NDArray[np.float32]  # [n, size], each of length 1

N_MELS = 80
WINDOW_SAMPLES = 24_000  # 1.5 s
HOP_SAMPLES = 12_000  # 0.75 s
FRAME_SAMPLES, FRAME_HOP = 400, 160  # 25 ms every 10 ms
N_FFT, EMPHASIS = 512, 0.97
FRAMES = 148  # in a window
HOP_FRAMES = HOP_SAMPLES // FRAME_HOP  # 75
BATCH = 8  # windows at a time: keeps a step short with large networks
SHORTEST_SAMPLES = 4_800  # 0.3 s: less does not identify a voice
PROBES = 3  # windows of noise to test a network with


def mel_weights() -> NDArray[np.float32]:
    """[N_FFT // 2 + 1, 80]: Kaldi's triangular filters from 20 Hz to 8 kHz."""
    hz = np.arange(N_FFT // 2 + 1) * (SAMPLE_RATE / N_FFT)
    lowest, highest = (1127 * np.log1p(edge / 700) for edge in (20, SAMPLE_RATE / 2))
    edges = np.linspace(lowest, highest, N_MELS + 2)
    mel = 1127 * np.log1p(hz / 700)[:, None]
    rising = (mel - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mel) / (edges[2:] - edges[1:-1])
    weights: NDArray[np.float32] = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    return weights


MEL_WEIGHTS = mel_weights()
HAMMING = np.hamming(FRAME_SAMPLES).astype(np.float32)


FRAMES_AT_ONCE = 256  # fit the cache


def fbank(pcm: Pcm | NDArray[np.float32]) -> Features:
    """Kaldi's log-mel energies [(n - 400) // 160 + 1, 80] of samples [n >= 400] like int16."""
    frames = sliding_window_view(pcm.astype(np.float32), FRAME_SAMPLES)[::FRAME_HOP]
    starts = range(0, frames.shape[0], FRAMES_AT_ONCE)
    return np.concatenate([_log_mels(frames[at : at + FRAMES_AT_ONCE]) for at in starts])


def _log_mels(frames: NDArray[np.float32]) -> Features:
    frames = frames - frames.mean(axis=1, keepdims=True)
    padded = np.zeros((frames.shape[0], N_FFT), np.float32)
    own = padded[:, :FRAME_SAMPLES]
    own[:] = frames
    own[:, 1:] -= np.float32(EMPHASIS) * frames[:, :-1]
    own[:, 0] *= np.float32(1 - EMPHASIS)
    own *= HAMMING
    spectrum = rfft(padded, axis=1, overwrite_x=True)
    power = spectrum.real**2
    power += spectrum.imag**2
    features: Features = np.log(np.maximum(power @ MEL_WEIGHTS, np.finfo(np.float32).eps))
    return features


def windows_of(pcm: Pcm) -> list[tuple[int, Features]]:
    """(middle in samples, features) of each window. Short speech is repeated to its length."""
    if pcm.shape[0] < SHORTEST_SAMPLES:
        return []
    features = fbank(pcm)
    last = features.shape[0] - FRAMES
    if last <= 0:
        return [(pcm.shape[0] // 2, np.resize(features, (FRAMES, N_MELS)))]
    starts = [*range(0, last - HOP_FRAMES // 3, HOP_FRAMES), last]
    middle = WINDOW_SAMPLES // 2
    return [(at * FRAME_HOP + middle, features[at : at + FRAMES]) for at in starts]


def directions(sums: NDArray[Any]) -> Vectors:
    found: Vectors = sums / np.maximum(1e-9, np.linalg.norm(sums, axis=1, keepdims=True))
    return found


def fingerprint(file: Path) -> str:
    """The first 12 digits of the file's SHA-256. Raises ConfigurationError."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigurationError(f"speakers.model: {error}") from error


class SpeakerNetwork:
    def __init__(self, file: Path) -> None:
        """Load and test the network. Raises ConfigurationError if it is unusable."""
        try:
            self._session = open_network(file)
            self._check(self._session.get_inputs(), self._session.get_outputs())
            self._probe()
        except Exception as error:  # onnxruntime has many of its own
            raise ConfigurationError(f"speakers.model: {file}: {error}") from error

    @staticmethod
    def _check(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        shapes = [list(one.shape) for one in (*inputs, *outputs)]
        n_mels = shapes[0][-1] if [len(shape) for shape in shapes] == [3, 2] else 0
        if n_mels != N_MELS and isinstance(n_mels, int):  # a name stands for any size
            raise ValueError(f"it is not [batch, frames, {N_MELS}] -> [batch, size]: {shapes}")

    def _probe(self) -> None:
        """A window's vector must not depend on its batch, and two windows must differ."""
        noise = np.random.default_rng(0).standard_normal((PROBES, FRAMES, N_MELS))
        windows = list(noise.astype(np.float32))
        together, alone = self.embed(windows), self.embed(windows[:1])
        if not np.isfinite(together).all() or np.abs(together[:1] - alone).max() > 1e-3:
            raise ValueError("a window's vector is not finite, or depends on other windows")
        if np.abs(together[0] - together[1]).max() < 1e-6:
            raise ValueError("every window has the same vector")

    def embed(self, windows: Sequence[Features]) -> Vectors:
        """windows: at most `BATCH`, each [FRAMES, 80]. Their means over frames are removed."""
        features = np.stack(windows)
        features -= features.mean(axis=1, keepdims=True)
        (name,) = (one.name for one in self._session.get_inputs())
        (vectors,) = self._session.run(None, {name: features})
        return directions(vectors)
