"""Joins decoded blocks to pieces of 30 s, whatever is in them.

For uploads that the router wants whole (`router.audio.whole`); runs inside the audio workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cluster.messages import WINDOW_SAMPLES, Pcm
from router.audio.windows import Window


class Pieces:
    """Takes PCM block by block and yields all of it, in windows of which only the last is short."""

    def __init__(self, max_samples: int = WINDOW_SAMPLES) -> None:
        self.n_samples = 0  # taken so far
        self._max_samples = max_samples
        self._waiting: list[Pcm] = []
        self._index = 0

    def feed(self, pcm: Pcm) -> Iterator[Window]:
        while pcm.shape[0]:
            room = self._max_samples - self.n_samples % self._max_samples
            self._waiting.append(pcm[:room])
            self.n_samples += self._waiting[-1].shape[0]
            pcm = pcm[room:]
            if self.n_samples % self._max_samples == 0:
                yield from self.finish()

    def finish(self) -> Iterator[Window]:
        """Yield what is left, after the last `feed`."""
        if self._waiting:
            pcm = np.concatenate(self._waiting)
            self._waiting.clear()
            yield Window(self._index, self.n_samples - pcm.shape[0], pcm)
            self._index += 1
