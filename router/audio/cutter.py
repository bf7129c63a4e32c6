"""Cuts a stream of 16 kHz PCM at pauses into windows of at most 30 s of contiguous audio.

- A full window ends in the best pause of its last 10 s: the longest up to 1 s, with up to 0.3 s
  more the later it is. Without a pause of 0.2 s it ends at the quietest spot.
- A silence of 3 s ends a window that is half full, and one of 8 s ends any, since the model drifts
  over long silence. Silence from 1.6 s on is left out.
- Audio that fits one window is one window. Without speech there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES, Pcm
from router.audio.vad import (
    BLOCK_SAMPLES,
    FRAME_SAMPLES,
    Feed,
    HeardAudio,
    Probabilities,
    SharedStream,
    SpeechDetector,
    VadOptions,
    is_sure,
    runs,
    speech_mask,
)
from router.audio.windows import CutOptions, Window, samples


class WindowCutter:
    """`feed` and `finish` must be exhausted. They yield None between steps."""

    def __init__(
        self,
        detector: SpeechDetector,
        options: CutOptions | None = None,
        vad: VadOptions | None = None,
        shared: SharedStream | None = None,
    ) -> None:
        """shared: the detector's pass, if others use it for this audio."""
        self._detector = detector
        self._vad = vad or detector.options
        self._shared = shared or SharedStream(detector)
        self._audio = HeardAudio(self._shared.reader())
        self._options = options or CutOptions()
        self._start = 0  # first sample of the next window, within the first frames
        self._index = 0

    @property
    def n_samples(self) -> int:
        return self._audio.end

    def feed(self, pcm: Pcm) -> Iterator[Window | None]:
        self._audio.add(pcm)
        if self.n_samples > WINDOW_SAMPLES:
            yield from self._hear(BLOCK_SAMPLES)

    def finish(self) -> Iterator[Window | None]:
        audio, options = self._audio, self._options
        if self.n_samples <= WINDOW_SAMPLES:
            yield from clip_window(audio.join(), self._detector, self._vad, options, self._shared)
            return
        yield from self._hear(1)
        if speech := runs(self._mask()):
            speech_end = audio.sample(speech[-1][1])
            yield self._cut(min(audio.end, options.tail_end(speech_end, audio.end)))

    def _hear(self, least: int) -> Iterator[Window | None]:
        for _ in self._audio.hear(least):
            yield from self._complete_windows()
            yield None

    def _spans(self, speech: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (self._audio.sample(first), self._audio.sample(last)) for first, last in speech
        )

    def _mask(self) -> NDArray[np.bool_]:
        mask = speech_mask(self._audio.probabilities, self._vad)
        mask[: -(-(self._start - self._audio.base) // FRAME_SAMPLES)] = False
        return mask

    def _complete_windows(self) -> Iterator[Window]:
        """Yield every window with a final end, and drop the silence before the next."""
        while True:
            mask = self._mask()
            self._skip_lead(mask)
            mask = mask[mask.shape[0] - self._audio.probabilities.shape[0] :]
            silence = self._ending_silence(mask)
            if silence is not None:
                yield self._cut_silence(*silence)
            elif min(self._audio.known_end, self._audio.end) - self._start >= WINDOW_SAMPLES:
                yield self._cut_full(mask)
            else:
                return

    def _skip_lead(self, mask: NDArray[np.bool_]) -> None:
        options = self._options
        speech = np.flatnonzero(mask)
        if speech.size:
            first, lead_s = self._audio.sample(int(speech[0])), options.max_lead_s
        else:  # keep the last second or so: its soft sounds may begin a word
            first, lead_s = min(self._audio.known_end, self._audio.end), options.drop_s
        if first - self._start > samples(lead_s):
            keep_s = options.pad_before_s if speech.size else options.drop_s
            self._move_start(first - samples(keep_s))

    def _ending_silence(self, mask: NDArray[np.bool_]) -> tuple[int, int] | None:
        """The first silence after speech that may end the window, in samples."""
        options = self._options
        speech = runs(mask)
        following = [start for start, _ in speech[1:]] + [mask.shape[0]]
        for (_, end), next_start in zip(speech, following, strict=False):
            silence = self._audio.sample(end), self._audio.sample(next_start)
            fill_s = (silence[0] - self._start) / SAMPLE_RATE
            silence_s = (next_start - end) * FRAME_SAMPLES / SAMPLE_RATE
            if fill_s * SAMPLE_RATE > WINDOW_SAMPLES:
                break
            half_full = fill_s >= options.half_full_s
            if silence_s >= (options.long_silence_s if half_full else options.skip_silence_s):
                return silence
        return None

    def _cut_silence(self, start: int, end: int) -> Window:
        options = self._options
        if end - start < samples(options.drop_s):
            return self._cut((start + end) // 2)
        limit = self._start + WINDOW_SAMPLES
        window = self._cut(min(start + samples(options.pad_after_s), limit))
        self._move_start(max(self._start, end - samples(options.pad_before_s)))
        return window

    def _cut_full(self, mask: NDArray[np.bool_]) -> Window:
        options = self._options
        limit = self._start + WINDOW_SAMPLES
        earliest = limit - min(samples(options.search_s), WINDOW_SAMPLES // 2)
        best, best_score = None, 0.0
        for first, last in runs(~mask):
            start, end = (
                max(self._audio.sample(first), earliest),
                min(self._audio.sample(last), limit),
            )
            length_s = (end - start) / SAMPLE_RATE
            if length_s < options.min_pause_s:
                continue
            lateness = (end - earliest) / (limit - earliest)
            score = min(length_s, 1.0) + 0.3 * lateness
            if score > best_score:
                best, best_score = (start, end), score
        if best is not None:
            return self._cut_silence(*best)
        return self._cut(self._quietest(earliest, limit))

    def _quietest(self, start: int, end: int) -> int:
        """Middle of the 0.2 s with the least energy and speech between two samples."""
        hop, hops = SAMPLE_RATE // 100, 20  # 10 ms; 0.2 s
        span = (end - start) // hop * hop
        pcm = self._audio.pcm[start - self._audio.base :][:span].astype(np.float32)
        energy = np.square(pcm).reshape(-1, hop).mean(axis=1) + 1.0  # [n]
        box = np.ones(hops) / hops
        level_db = 10 * np.log10(np.convolve(energy, box, "valid"))
        at = start - self._audio.base + np.arange(energy.shape[0]) * hop
        speech = self._audio.probabilities[at // FRAME_SAMPLES]
        cost = level_db + 6.0 * np.convolve(speech, box, "valid")
        cost -= np.arange(cost.shape[0]) * (0.3 * hop / SAMPLE_RATE)  # 0.3 dB for a second later
        return start + (int(np.argmin(cost)) + hops // 2) * hop

    def _cut(self, end: int) -> Window:
        assert 0 < end - self._start <= WINDOW_SAMPLES, (self._start, end)
        pcm = self._audio.pcm[self._start - self._audio.base : end - self._audio.base]
        first, last = (at - self._audio.base for at in (self._start, end))
        probabilities = self._audio.probabilities[
            first // FRAME_SAMPLES : -(-last // FRAME_SAMPLES)
        ]
        is_faint = not is_sure(probabilities, self._vad)
        speech = self._spans(runs(self._mask()))
        window = Window(self._index, self._start, pcm, is_faint, speech)
        self._index += 1
        self._move_start(end)
        return window

    def _move_start(self, start: int) -> None:
        self._audio.drop(max(0, start - self._audio.base) // FRAME_SAMPLES)
        self._start = start


PROBE_SAMPLES = 8 * FRAME_SAMPLES  # 0.256 s: a step of the search for the first speech


def clip_window(
    pcm: Pcm, detector: SpeechDetector, vad: VadOptions, options: CutOptions, shared: SharedStream
) -> Iterator[Window | None]:
    """The window of audio that fits one. Of short audio only start and end are searched."""
    if not pcm.shape[0]:
        return
    peak = max(int(pcm.max()), -int(pcm.min()))
    end, is_faint = pcm.shape[0], True
    for known, probabilities in _scan(pcm, PROBE_SAMPLES, detector.stream(peak).feed):
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
        for _, whole in _scan(pcm, BLOCK_SAMPLES, shared.of_clip(peak)):
            probabilities = whole
            yield None
        known, speech = end, runs(speech_mask(probabilities, vad)) or speech
    spans = None
    if known >= end:  # all speech is known
        spans = tuple((first * FRAME_SAMPLES, last * FRAME_SAMPLES) for first, last in speech)
        end = min(end, options.tail_end(spans[-1][1], end))
    start = first - samples(options.pad_before_s) if first > samples(options.max_lead_s) else 0
    yield Window(0, start, pcm[start:end], is_faint, spans)


def _scan(pcm: Pcm, step: int, feed: Feed) -> Iterator[tuple[int, Probabilities]]:
    """Run the detector from the start. Yields (end of what was heard, probabilities)."""
    probabilities = np.empty(0, np.float32)
    for at in range(0, pcm.shape[0], step):
        probabilities = np.concatenate((probabilities, feed(pcm[at : at + step])))
        yield at + step, probabilities


def _has_speech(pcm: Pcm, peak: int, detector: SpeechDetector, vad: VadOptions) -> bool:
    scan = _scan(pcm, PROBE_SAMPLES, detector.stream(peak).feed)
    return any(speech_mask(probabilities, vad).any() for _, probabilities in scan)
