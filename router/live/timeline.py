"""A session's audio. Places in it are samples from the session's start, at 16 kHz."""

from __future__ import annotations

from collections import deque

import numpy as np

from cluster.common.messages import SAMPLE_RATE, Pcm

QUIET_SAMPLES = SAMPLE_RATE * 3 // 50  # 60 ms, over which loudness is measured


def seconds(n_samples: int) -> float:
    return n_samples / SAMPLE_RATE


def milliseconds(n_samples: int) -> int:
    return n_samples * 1000 // SAMPLE_RATE


def quietest(audio: Pcm, first: int, last: int) -> tuple[int, float]:
    """The middle of the quietest 60 ms between two samples of `audio`, and their energy.

    Among equally quiet places, the latest is taken. If the span is shorter than 60 ms, the result
    is its first sample with an infinite energy.
    """
    last = min(last, int(audio.shape[0]) - QUIET_SAMPLES)
    if last <= first:
        return max(0, min(first, int(audio.shape[0]))), float("inf")
    span = audio[first : last + QUIET_SAMPLES].astype(np.float64)
    power = np.concatenate(([0.0], np.cumsum(np.square(span))))
    level = power[QUIET_SAMPLES:] - power[:-QUIET_SAMPLES]
    latest = int(level.shape[0]) - 1 - int(np.argmin(level[::-1]))
    return first + latest + QUIET_SAMPLES // 2, float(level[latest])


class AudioBuffer:
    """The audio that may still be decoded.

    start, end: the samples between which it lies.
    """

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._chunks: deque[Pcm] = deque()

    def append(self, pcm: Pcm) -> None:
        self._chunks.append(pcm)
        self.end += int(pcm.shape[0])

    def span(self, first: int, last: int) -> Pcm:
        """A copy of the samples from `first` to `last`, int16; they must still be there."""
        assert self.start <= first <= last <= self.end, (self.start, first, last, self.end)
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks.clear()
            self._chunks.append(joined)
        chunk = self._chunks[0] if self._chunks else np.empty(0, np.int16)
        return chunk[first - self.start : last - self.start].copy()

    def drop_before(self, first: int) -> None:
        """Drop audio before sample `first`, in whole chunks where these are short."""
        while self._chunks and self.start + self._chunks[0].shape[0] <= first:
            self.start += int(self._chunks.popleft().shape[0])
        if self._chunks and first - self.start > 4 * SAMPLE_RATE:  # one long chunk
            self._chunks[0] = self._chunks[0][first - self.start :].copy()
            self.start = first
