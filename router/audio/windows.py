"""Windows, the options by which they are cut, and plain pieces of 30 s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES, Pcm


@dataclass(frozen=True, slots=True)
class Window:
    """A contiguous stretch of the upload."""

    index: int  # in time order
    start_sample: int  # in the decoded upload
    pcm: Pcm  # int16 [1 to WINDOW_SAMPLES]; read-only in the router
    is_faint: bool = False  # the detector found speech, but was not sure
    speech: tuple[tuple[int, int], ...] | None = None  # samples of the upload; None: not all known

    @property
    def n_samples(self) -> int:
        return int(self.pcm.shape[0])

    @property
    def start_s(self) -> float:
        return self.start_sample / SAMPLE_RATE

    @property
    def end_s(self) -> float:
        return (self.start_sample + self.n_samples) / SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class CutOptions:
    max_lead_s: float = 0.8  # before speech: Whisper's first timestamp is at most 1.0 s
    pad_before_s: float = 0.5  # kept around speech where silence is left out
    pad_after_s: float = 1.0  # the end of a sentence may be too soft for the detector
    min_pause_s: float = 0.19  # six frames: 0.2 s, less the frame grid
    search_s: float = 10.0  # from a window's limit back to the earliest pause that may end it
    drop_s: float = 1.6  # shortest silence that is left out
    half_full_s: float = 15.0  # so that short remarks do not take an encode each
    short_s: float = 10.0  # a clip of which only start and end are searched for speech
    long_silence_s: float = 3.0  # ends a window of at least `half_full_s`
    skip_silence_s: float = 8.0  # ends any window

    def tail_end(self, speech_end: int, pcm_end: int) -> int:
        """End of audio behind its last speech: a long silence is cut to the pad."""
        if pcm_end - speech_end < samples(self.drop_s):
            return pcm_end
        return speech_end + samples(self.pad_after_s)


def samples(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE)


class Pieces:
    """Cuts all audio into pieces, for uploads that the router reads whole."""

    def __init__(self, max_samples: int = WINDOW_SAMPLES) -> None:
        self.n_samples = 0  # fed so far
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
        if self._waiting:
            pcm = np.concatenate(self._waiting)
            self._waiting.clear()
            yield Window(self._index, self.n_samples - pcm.shape[0], pcm)
            self._index += 1
