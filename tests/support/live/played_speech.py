"""Speech that a test makes up: words with exact times, a detector, and pools that hear them.

Each word is a run of samples of one value. Like real models the pools guess cut words, end a text
with the audio, and hear nothing behind a full stop that the speaker did not make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.common.messages import (
    SAMPLE_RATE,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    Pcm,
)
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.audio.vad import FRAME_SAMPLES, SpeechDetector, VadOptions
from tests.support.requests import AnyPool, handle_of

Floats = NDArray[np.float32]

BASE = 1000  # the value of word 0
STEP = 320  # samples of an encoder position


@dataclass(frozen=True, slots=True)
class SpokenWord:
    text: str
    start_s: float
    end_s: float


def spoken(
    text: str, *, at_s: float = 0.5, word_s: float = 0.3, gap_s: float = 0.0
) -> list[SpokenWord]:
    """The words of `text` one after another; a number in brackets is a pause: "one. (0.8) two"."""
    words = []
    for part in text.split():
        if part.startswith("("):
            at_s += float(part.strip("()"))
            continue
        words.append(SpokenWord(part, at_s, at_s + word_s))
        at_s += word_s + gap_s
    return words


def pcm_of_words(words: Sequence[SpokenWord], tail_s: float = 1.0) -> Pcm:
    """Int16 [n]: the words, silence between them, and `tail_s` of it at the end."""
    pcm = np.zeros(round((words[-1].end_s + tail_s) * SAMPLE_RATE), np.int16)
    for index, word in enumerate(words):
        pcm[round(word.start_s * SAMPLE_RATE) : round(word.end_s * SAMPLE_RATE)] = BASE + index
    return pcm


class LoudIsSpeech(SpeechDetector):
    def __init__(self) -> None:
        self.options = VadOptions()

    def run(self, frames: Floats, h: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
        own = frames[:, -FRAME_SAMPLES:]  # without the context of the frame before
        return (np.abs(own) > 0.01).mean(axis=1).round().astype(np.float32), h, c


class SlowToHear(LoudIsSpeech):
    """Hears speech two frames after it began, as real detectors do; of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[float] = [0.0, 0.0]

    def run(self, frames: Floats, h: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
        heard, h, c = super().run(frames, h, c)
        assert heard.shape == (1,), "one frame at a time"
        self._before = [*self._before[1:], float(heard[0])]
        return np.array([min(self._before)], np.float32), h, c


class PlayedListeners(AnyPool):
    """Both pools: they hear the words in a window's samples, behind the forced tokens."""

    def __init__(self, tokenizer: WhisperTokenizer, words: Sequence[SpokenWord]) -> None:
        self.tokenizer = tokenizer
        self.words = list(words)
        self.encode_s: Callable[[int], float] = lambda nth: 0.05
        self.fault: Callable[[int], Exception | None] = lambda nth: None  # of the nth decode
        self.encoded: list[EncodeRequest] = []
        self.decoded: list[DecodeRequest] = []
        self.cancelled = 0
        self.language = "en"
        self.ratio: Callable[[str], float] = lambda text: 1.0  # of compression, by the text
        self._pcm: dict[str, Pcm] = {}

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        nth = len(self.encoded)
        self.encoded.append(request)
        lease = f"lease-{nth}"
        self._pcm[lease] = request.pcm
        try:
            await asyncio.sleep(self.encode_s(nth))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        handle = handle_of(request, lease)
        return EncodeReply(handle, EncodeTimings(0.0, 0.05, 1))

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        nth = len(self.decoded)
        self.decoded.append(request)
        await asyncio.sleep(0.01)
        if (error := self.fault(nth)) is not None:
            raise error
        prefix, limit = request.options.prefix_tokens, request.options.max_new_tokens or 224
        heard, peaks = self._heard(self._pcm[request.handle.lease], prefix)
        tokens, peaks = heard[:limit], peaks[:limit]
        return DecodeResult(
            request.request_id, request.window, tuple(tokens), (-0.1,) * len(tokens), -0.1,
            0.0, request.options.language or self.language, 0.0,
            "stop" if tokens == heard else "length",
            DecodeTimings(0.0, 0.0, 100, "memory", 0.0, 0.01, 3),
            compression_ratio=self.ratio(self.tokenizer.decode((*prefix, *tokens))),
            peak_positions=tuple(peaks) if request.options.peaks else None,
        )  # fmt: skip

    def _heard(self, pcm: Pcm, prefix_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        begin = self.tokenizer.special.timestamp_begin
        text = self.tokenizer.decode([token for token in prefix_tokens if token < begin])
        tokens: list[int] = []
        peaks: list[int] = []

        def say(token: int, at: int) -> None:
            tokens.append(token)
            peaks.append(at)

        said = text.split()
        spoken = self._words_in(pcm)
        n = len(said)
        if n and said[-1].endswith(".") and n <= len(spoken) and not spoken[n - 1][0].endswith("."):
            return [], []  # a full stop that nobody made: the text seems to be over
        is_open = bool(prefix_tokens)  # whether a timestamp has begun the segment
        if n and n <= len(spoken) and spoken[n - 1][0].endswith(".") and not said[-1].endswith("."):
            word, first, last = spoken[n - 1]
            say(self.tokenizer.encode(".")[0], last // STEP)
            say(begin + last // STEP, last // STEP)
            is_open = False
        elif n and prefix_tokens[-1] < begin and said[-1].endswith("."):
            is_open = True
        elif 0 < n <= len(spoken) and spoken[n - 1][0].startswith(said[-1]):
            word, first, last = spoken[n - 1]
            for token in self.tokenizer.encode(word.rstrip(".")[len(said[-1]) :]):
                say(token, first // STEP + 2)  # its last tokens had no room
        for index, (word, first, last) in enumerate(spoken[n:]):
            if not is_open:
                say(begin + first // STEP, first // STEP)
                is_open = True
            for token in self.tokenizer.encode(" " + word):
                say(token, first // STEP + 2)
            if word.endswith(".") or index == len(spoken) - n - 1:
                if not word.endswith("."):
                    say(self.tokenizer.encode(".")[0], last // STEP)
                say(begin + last // STEP, last // STEP)
                is_open = False
        return tokens, peaks

    def _words_in(self, pcm: Pcm) -> list[tuple[str, int, int]]:
        edges = np.flatnonzero(np.diff(pcm, prepend=0, append=0))
        found = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            value = int(pcm[first])
            if value < BASE:
                continue
            word = self.words[value - BASE]
            length = round((word.end_s - word.start_s) * SAMPLE_RATE)
            text = word.text
            if last - first < 0.9 * length:
                if last - first < 0.15 * length:
                    continue
                text = "guess" if last == pcm.shape[0] else "other"
            found.append((text, first, last))
        return found
