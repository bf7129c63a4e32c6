"""The quietest place in a span of audio, where a cut harms no word."""

from __future__ import annotations

import numpy as np

from cluster.messages import SAMPLE_RATE, Pcm

QUIET_SAMPLES = SAMPLE_RATE * 3 // 50  # 60 ms: the quietest of these is where a cut is made


def quietest(audio: Pcm, first: int, last: int) -> tuple[int, float]:
    """The sample in the middle of the quietest 60 ms between two samples, and how loud they are.

    Of places that are equally quiet it is the latest. Where there is no room for 60 ms it is the
    first sample, infinitely loud.
    """
    last = min(last, int(audio.shape[0]) - QUIET_SAMPLES)
    if last <= first:
        return max(0, min(first, int(audio.shape[0]))), float("inf")
    span = audio[first : last + QUIET_SAMPLES].astype(np.float64)
    power = np.concatenate(([0.0], np.cumsum(np.square(span))))
    level = power[QUIET_SAMPLES:] - power[:-QUIET_SAMPLES]
    latest = int(level.shape[0]) - 1 - int(np.argmin(level[::-1]))
    return first + latest + QUIET_SAMPLES // 2, float(level[latest])
