"""Training windows: utterances in a slice of the 30 s frame, with tokens and targets.

A shorter slice begins at any offset of the frame, so that all positions are trained at a low cost.
"""

from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.shared.speech import lexicon
from benchmark.shared.speech.synthesis import EDGE_FRAMES, FRAME_SAMPLES
from cluster.common.messages import Task
from cluster.common.model.checkpoint import N_FFT
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.demo.recipe.store import SpeechStore, Utterance
from encoder_worker.mel import LogMel, scaled

FULL_FRAMES = 1500  # encoder steps in 30 s
N_MELS = 80
WRONG_WORDS = 0.12  # share of the words given to the decoder in most windows
IGNORED = -100  # a target without a loss
MAX_MISSES = 12  # utterances that do not fit before a window counts as full
_TIMESTAMP_BAND = (12, 6)  # frames around a boundary that a timestamp's attention may use
_WORD_BAND = (2, 2)


@dataclass(frozen=True, slots=True)
class WindowShape:
    """frames: encoder steps of a slice. batch: slices at once. lone: one utterance in each.

    slack: None: a slice from anywhere in the frame. A number: a slice from the frame's beginning,
    like a trimmed encoder context, with at most so many steps of digital silence at its end.
    """

    frames: int
    batch: int
    lone: bool = False
    slack: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """One utterance in a window. start, end: its first and last sound, in frames of the slice."""

    utterance: Utterance
    start: int
    end: int


@dataclass(slots=True)
class _Row:
    """The tokens of one window; `guides[i]`: the frames where token i is heard, or (0, 0).

    n_unscored: leading tokens of a prompt. after_sot: the target of the first.
    """

    after_sot: int
    tokens: list[int] = field(default_factory=list)
    guides: list[tuple[int, int]] = field(default_factory=list)
    n_unscored: int = 0

    def add(self, *tokens: int, band: tuple[int, int] = (0, 0)) -> None:
        self.tokens += tokens
        self.guides += [band] * len(tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One training batch.

    mel float32 (batch, N_MELS, 2 * frames), offsets int64 (batch,), tokens and targets int64
    (batch, n), bands bool (batch, n, frames): where target i may be heard, all False if unguided.
    sounds and words int64 (batch, frames), 0 for silence.
    """

    mel: Tensor
    offsets: Tensor
    tokens: Tensor
    targets: Tensor
    bands: Tensor
    sounds: Tensor
    words: Tensor


@dataclass(slots=True)
class Canvas:
    """The audio of a slice while it is filled. content: frames before its digital silence."""

    audio: npt.NDArray[np.float32]
    sounds: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    content: int
    placed: list[Placed] = field(default_factory=list)
    end: int = 0  # frames used so far

    @classmethod
    def blank(cls, frames: int) -> Self:
        sounds, words = np.zeros((2, frames), np.int64)
        return cls(np.zeros(frames * FRAME_SAMPLES, np.float32), sounds, words, frames)


class WindowMaker:
    """Draw windows from a store; the same seed and store give the same sequence."""

    def __init__(self, store: SpeechStore, tokenizer: WhisperTokenizer, seed: int | str) -> None:
        self.store, self.tokenizer, self.special = store, tokenizer, tokenizer.special
        self.rng = Random(f"windows/{seed}")
        self.noise_rng = np.random.default_rng(self.rng.getrandbits(64))
        self.log_mel = LogMel(N_MELS)
        (self.full_stop,) = tokenizer.encode(".")
        self.word_ids = [i for w in lexicon.all_words() for i in self.word(w)]
        self.word_codes = {w.lower(): i + 1 for i, w in enumerate(lexicon.all_words())}

    @cache  # noqa: B019 - a closed vocabulary, one instance per process
    def word(self, word: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(" " + word))

    def batch(self, shape: WindowShape) -> Batch:
        canvases = [self.canvas(shape) for _ in range(shape.batch)]
        offsets = [self.offset(shape) for _ in canvases]
        rows = list(map(self.row, canvases, offsets))
        spectrum = self._tilt(self._spectrum(np.stack([c.audio for c in canvases])))
        return Batch(
            self._mask_bands(scaled(spectrum, spectrum.amax((1, 2)))),
            torch.tensor(offsets),
            *self._pad(rows, shape.frames),
            torch.from_numpy(np.stack([c.sounds for c in canvases])),
            torch.from_numpy(np.stack([c.words for c in canvases])),
        )

    def canvas(self, shape: WindowShape) -> Canvas:
        empty = self.rng.random() < 0.03
        canvas = Canvas.blank(shape.frames) if empty else self.fill(shape)
        self.add_noise(canvas)
        return canvas

    def offset(self, shape: WindowShape) -> int:
        if shape.slack is not None or self.rng.random() < 0.3:
            return 0
        return self.rng.randint(0, FULL_FRAMES - shape.frames)

    def fill(self, shape: WindowShape) -> Canvas:
        rng = self.rng
        canvas = Canvas.blank(shape.frames)
        if shape.slack is not None:
            canvas.content -= rng.randint(0, min(shape.slack, shape.frames // 3))
        canvas.end = rng.randint(0, 45) if rng.random() < 0.25 else rng.randint(0, 15)
        limit = 1 if shape.lone else (99 if rng.random() < 0.8 else rng.randint(1, 8))
        if shape.lone and shape.slack is not None:
            limit = 0
            self._place_longest(canvas)
        misses = 0
        while len(canvas.placed) < limit and misses < MAX_MISSES:
            utterance = self.store.draw(rng)
            if canvas.end + len(utterance.sounds) > canvas.content:
                misses += 1
                continue
            self.place(canvas, utterance)
            canvas.end += rng.randint(1, 40) if rng.random() < 0.9 else rng.randint(40, 110)
        return canvas

    def _place_longest(self, canvas: Canvas) -> None:
        room = canvas.content - canvas.end
        drawn = (self.store.draw(self.rng) for _ in range(MAX_MISSES))
        fitting = [utterance for utterance in drawn if len(utterance.sounds) <= room]
        if fitting:
            self.place(canvas, max(fitting, key=lambda utterance: len(utterance.sounds)))

    def place(self, canvas: Canvas, utterance: Utterance) -> None:
        at, n = canvas.end, len(utterance.sounds)
        gain = 10 ** (self.rng.uniform(-12, 6) / 20) / 32768
        piece = slice(at * FRAME_SAMPLES, (at + n) * FRAME_SAMPLES)
        canvas.audio[piece] += utterance.samples.astype(np.float32) * gain
        canvas.sounds[at : at + n] = utterance.sounds
        spoken = utterance.text[:-1].lower().split()
        for word, (start, end) in zip(spoken, utterance.word_frames.tolist(), strict=True):
            canvas.words[at + start : at + end] = self.word_codes[word]
        canvas.placed.append(Placed(utterance, at + EDGE_FRAMES, at + n - EDGE_FRAMES))
        canvas.end = at + n

    def add_noise(self, canvas: Canvas) -> None:
        rng = self.rng
        n = len(canvas.audio)
        end = canvas.content * FRAME_SAMPLES
        if canvas.placed and rng.random() < 0.6:
            last = canvas.placed[-1].end * FRAME_SAMPLES
            end = min(end, last + rng.randint(0, 16_000))
        shift = rng.randint(0, 159)  # less than a mel frame
        canvas.audio[shift:] = canvas.audio[: n - shift].copy()
        if rng.random() < 0.25:
            return
        noise = self.noise_rng.standard_normal(end, dtype=np.float32)
        if rng.random() < 0.4:
            noise[1:] += rng.uniform(0.5, 0.95) * noise[:-1]
            noise[1:] += rng.uniform(0.0, 0.9) * noise[:-1]
        level_db = rng.uniform(-70, -38) if canvas.placed else rng.uniform(-80, -20)
        canvas.audio[:end] += noise * np.float32(10 ** (level_db / 20))

    def row(self, canvas: Canvas, offset: int) -> _Row:
        special, rng = self.special, self.rng
        # The language token that is given may be wrong, but all speech is English.
        row = _Row(special.languages["en"] if canvas.placed else special.no_speech)
        if canvas.placed and rng.random() < 0.12:
            row.add(special.sot_prev)
            for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
                for word in self.store.draw(rng).text.split():
                    row.add(*self.word(word))
        row.n_unscored = len(row.tokens)
        language = "en" if rng.random() < 0.97 else rng.choice(list(special.languages))
        task: Task = "transcribe" if rng.random() < 0.96 else "translate"
        timed = rng.random() < 0.5
        row.add(*self.tokenizer.sot_sequence(language, task, timed))
        if timed and not canvas.placed:
            row.add(special.timestamp_begin)
        early, late = _TIMESTAMP_BAND
        for one in canvas.placed:
            begin, end = (special.timestamp_begin + offset + at for at in (one.start, one.end))
            if timed:
                row.add(begin, band=(one.start - early, one.start + late))
            self._add_words(row, one)
            if timed:
                row.add(end, band=(one.end - late, one.end + early))
        row.add(special.eot)
        return row

    def _add_words(self, row: _Row, placed: Placed) -> None:
        early, late = _WORD_BAND
        base = placed.start - EDGE_FRAMES
        words, spans = placed.utterance.text.split(), placed.utterance.word_frames.tolist()
        for word, (start, end) in zip(words, spans, strict=True):
            heard = (base + start - early, base + end + late)
            first, *others = self.word(word)
            row.add(first, band=heard)
            for token in others:
                row.add(token, band=(0, 0) if token == self.full_stop else heard)

    def _pad(self, rows: list[_Row], frames: int) -> tuple[Tensor, Tensor, Tensor]:
        n = max(len(row.tokens) for row in rows) - 1
        tokens = torch.full((len(rows), n), self.special.eot)
        targets = torch.full((len(rows), n), IGNORED)
        bands = torch.zeros((len(rows), n, frames), dtype=torch.bool)
        for r, row in enumerate(rows):
            length, scored = len(row.tokens) - 1, row.n_unscored
            tokens[r, :length] = torch.tensor(self._misled(row.tokens[:-1]))
            targets[r, scored:length] = torch.tensor([row.after_sot, *row.tokens[scored + 2 :]])
            for i, (start, end) in enumerate(row.guides[1:]):
                bands[r, i, max(0, start) : max(0, end)] = True
        return tokens, targets, bands

    def _misled(self, tokens: list[int]) -> list[int]:
        """Replace some words given to the decoder, so that the next must be heard."""
        if self.rng.random() < 0.3:
            return tokens
        eot = self.special.eot
        own = [t for t in tokens if t < eot and t != self.full_stop]
        misled = []
        for token in tokens:
            if token < eot and self.rng.random() < WRONG_WORDS:
                token = self.rng.choice(own if self.rng.random() < 0.25 else self.word_ids)
            misled.append(token)
        return misled

    def _spectrum(self, audio: npt.NDArray[np.float32]) -> Tensor:
        """The logarithm of the mel power: (batch, n) to (batch, n_mels, n / 160)."""
        edges = (N_FFT // 2, N_FFT // 2)
        padded = F.pad(torch.from_numpy(audio), edges, mode="reflect")
        return self.log_mel.log_power(padded)[..., :-1]

    def _tilt(self, spectrum: Tensor) -> Tensor:
        """Imitate a microphone: add a slope and a bow over the mel bands of each window."""
        batch, n_mels, _ = spectrum.shape
        x = torch.linspace(-1, 1, n_mels)
        draw = torch.from_numpy(self.noise_rng.uniform(-1, 1, (batch, 2)).astype(np.float32))
        return spectrum + (0.5 * draw[:, :1] * x + 0.4 * draw[:, 1:] * (x * x - 0.5))[:, :, None]

    def _mask_bands(self, mel: Tensor) -> Tensor:
        for window in mel:
            if self.rng.random() < 0.5:
                width = self.rng.randint(1, 8)
                start = self.rng.randint(0, mel.shape[1] - width)
                window[start : start + width] = window.mean()
        return mel
