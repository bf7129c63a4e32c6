"""The window of a clip: audio that fits one window.

Speech near its start and near its end is all there is to find, so the voice detector rarely has to
hear the whole of a short clip. Runs inside the audio workers, for `router.audio.cutter`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cluster.messages import Pcm
from router.audio.vad import (
    BLOCK_SAMPLES,
    FRAME_SAMPLES,
    SpeechDetector,
    VadOptions,
    is_sure,
    runs,
    speech_mask,
)
from router.audio.windows import CutOptions, Window, samples

PROBE_SAMPLES = 8 * FRAME_SAMPLES  # 0.256 s: a step of the look for the first speech


def clip_window(
    pcm: Pcm, detector: SpeechDetector, vad: VadOptions, options: CutOptions
) -> Iterator[Window | None]:
    """Yield the clip's window, if there is speech in it, and None between steps.

    Looks for speech beyond doubt, and then only whether the last seconds hold any.
    """
    if not pcm.shape[0]:
        return
    peak = max(int(pcm.max()), -int(pcm.min()))
    end, is_faint = pcm.shape[0], True
    for known, probabilities in _scan(pcm, peak, PROBE_SAMPLES, detector):
        speech = runs(speech_mask(probabilities, vad))
        if speech and is_sure(probabilities, vad):
            is_faint = False
            break
        if known % BLOCK_SAMPLES == 0:
            yield None
    if not speech:
        return
    first = speech[0][0] * FRAME_SAMPLES
    tail = pcm.shape[0] - samples(options.long_silence_s)
    is_long = pcm.shape[0] > samples(options.short_s)
    if tail > known and (is_long or not _has_speech(pcm[tail:], peak, detector, vad)):
        yield None
        for _, whole in _scan(pcm, peak, BLOCK_SAMPLES, detector):
            probabilities = whole
            yield None
        known, speech = end, runs(speech_mask(probabilities, vad)) or speech
    spans = None
    if known >= end:  # all speech is known, the last as well
        spans = tuple((first * FRAME_SAMPLES, last * FRAME_SAMPLES) for first, last in speech)
        end = min(end, options.tail_end(spans[-1][1], end))
    start = first - samples(options.pad_before_s) if first > samples(options.max_lead_s) else 0
    yield Window(0, start, pcm[start:end], is_faint, spans)


def _scan(
    pcm: Pcm, peak: int, step: int, detector: SpeechDetector
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Run the detector from the start, and yield how far it has been and what it found."""
    stream = detector.stream(peak)
    probabilities = np.empty(0, np.float32)
    for at in range(0, pcm.shape[0], step):
        probabilities = np.concatenate((probabilities, stream.feed(pcm[at : at + step])))
        yield at + step, probabilities


def _has_speech(pcm: Pcm, peak: int, detector: SpeechDetector, vad: VadOptions) -> bool:
    scan = _scan(pcm, peak, PROBE_SAMPLES, detector)
    return any(speech_mask(probabilities, vad).any() for _, probabilities in scan)
