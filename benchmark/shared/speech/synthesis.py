"""Synthesise speech by espeak-ng and flite, with the time of every word and sound.

Both libraries are called by ctypes and keep global state: one thread of a process may speak.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import numpy.typing as npt
import soxr

from benchmark.shared.speech import corpus
from cluster.common.messages import SAMPLE_RATE

FRAME_S = 0.02  # one encoder position; all times are kept on this grid
FRAME_SAMPLES = 320
PEAK = 0.5  # every utterance is scaled to this peak
EDGE_FRAMES = 2  # kept before the first and after the last sound

_ESPEAK_SYNCHRONOUS = 2
_ESPEAK_PHONEME_EVENTS = 1
_ESPEAK_DONT_EXIT = 0x8000
_ESPEAK_UTF8 = 1
_ESPEAK_RATE, _ESPEAK_PITCH, _ESPEAK_RANGE = 1, 3, 4
_EVENT_END, _EVENT_WORD, _EVENT_PHONEME = 0, 1, 7
_WORD_END = b"R:SylStructure.daughtern.daughtern.R:Segment.end"

ESPEAK_VOICES = (
    "en-us", "en-us+m1", "en-us+m3", "en-us+m4", "en-us+m7", "en-us+f1", "en-us+f2", "en-us+f4",
    "en-us+Alex", "en-us+Mario", "en-us+linda", "en-us+steph", "en-us+klatt2", "en-us+michael",
    "en-gb-x-rp", "en-gb-x-rp+m3", "en-gb-x-rp+f2", "en-gb-scotland", "en-us-nyc+f4",
)  # fmt: skip
FLITE_VOICES = ("slt", "rms", "awb", "kal16")
UNHEARD_VOICES = ("en-us+f5", "en-gb-x-rp+m6")  # for the evaluation alone: never in the corpus
# flite's three statistical voices take most of the synthesis time, and are the clearest.
_VOICE_WEIGHTS = {"slt": 3.0, "rms": 3.0, "awb": 3.0, "kal16": 3.0}
SILENT_SOUNDS = frozenset({"pau", "_", "_:", ";", "_|", ""})


@dataclass(frozen=True, slots=True)
class Manner:
    """How one utterance is spoken; `pitch_ratio` shifts pitch and speed together."""

    voice: str
    rate_wpm: int
    pitch: int
    stretch: float
    pitch_ratio: float


@dataclass(frozen=True, slots=True)
class Spoken:
    """`samples` is int16 [n] at 16 kHz. `word_frames` is int32 [n_words, 2], starts and ends in
    frames of 20 ms. `sounds` names the sound of each frame, "" for silence.
    """

    text: str
    voice: str
    samples: npt.NDArray[np.int16]
    word_frames: npt.NDArray[np.int32]
    sounds: list[str]


def draw_manner(rng: Random, voices: tuple[str, ...] = ESPEAK_VOICES + FLITE_VOICES) -> Manner:
    weights = [_VOICE_WEIGHTS.get(v, 1.0) for v in voices]
    return Manner(
        voice=rng.choices(voices, weights)[0],
        rate_wpm=rng.randint(140, 195),
        pitch=rng.randint(30, 70),
        stretch=rng.uniform(0.85, 1.15),
        pitch_ratio=rng.uniform(0.9, 1.12),
    )


class SynthesisError(RuntimeError):
    """A speech library is missing, or refused its input."""


class RefusedError(SynthesisError):
    """A library refused a voice or a text; another one may do."""


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SynthesisError(f"{name} is missing: `make tools` installs it") from error


@dataclass(frozen=True, slots=True)
class _Raw:
    """A library's output, in seconds of its own clock."""

    samples: npt.NDArray[np.int16]
    sample_rate: int
    word_starts: list[tuple[int, float]]  # (index of the word, start in s)
    sounds: list[tuple[str, float]]  # (name, end in s)


class _Espeak:
    def __init__(self) -> None:
        self._lib = _load("libespeak-ng.so.1")
        options = _ESPEAK_PHONEME_EVENTS | _ESPEAK_DONT_EXIT
        self.sample_rate = int(self._lib.espeak_Initialize(_ESPEAK_SYNCHRONOUS, 0, None, options))
        if self.sample_rate <= 0:
            raise SynthesisError("espeak-ng did not start: is espeak-ng-data installed?")
        self._audio: list[bytes] = []
        self._events: list[tuple[int, int, int, str]] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
        )
        self._callback = kind(self._on_audio)  # kept: C holds only the address
        self._lib.espeak_SetSynthCallback(self._callback)

    def _on_audio(self, wave: object, n_samples: int, events: "ctypes.Array[_Event]") -> int:
        if wave and n_samples:
            self._audio.append(ctypes.string_at(wave, 2 * n_samples))  # type: ignore[arg-type]
        i = 0
        while (event := events[i]).type != _EVENT_END:
            name = event.id.decode("utf-8", "replace") if event.type == _EVENT_PHONEME else ""
            self._events.append((event.type, event.text_position, event.sample, name))
            i += 1
        return 0

    def speak(self, text: str, manner: Manner) -> _Raw:
        if self._lib.espeak_SetVoiceByName(manner.voice.encode()) != 0:
            raise RefusedError(f"espeak-ng has no voice {manner.voice!r}")
        self._lib.espeak_SetParameter(_ESPEAK_RATE, manner.rate_wpm, 0)
        self._lib.espeak_SetParameter(_ESPEAK_PITCH, manner.pitch, 0)
        self._audio, self._events = [], []
        data = text.encode()
        self._lib.espeak_Synth(data, len(data) + 1, 0, 1, 0, _ESPEAK_UTF8, None, None)
        samples = np.frombuffer(b"".join(self._audio), dtype=np.int16)
        starts = {0: 0}  # text position of a word's first letter -> index of the word
        for i, char in enumerate(text):
            if char == " ":
                starts[i + 1] = len(starts)
        words: list[tuple[int, float]] = []
        sounds: list[tuple[str, float]] = []
        current = ""
        for kind, position, sample, name in self._events:
            at = sample / self.sample_rate
            if kind == _EVENT_WORD and position - 1 in starts:
                words.append((starts[position - 1], at))
            elif kind == _EVENT_PHONEME:
                sounds.append((current, at))
                current = name
        sounds.append((current, len(samples) / self.sample_rate))
        return _Raw(samples, self.sample_rate, words, sounds)


class _Flite:
    def __init__(self) -> None:
        self._lib = lib = _load("libflite.so.1")
        for part in ("usenglish", "cmulex"):
            _load(f"libflite_{part}.so.1")
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, arguments in (
            ("flite_synth_text", pointer, [text, pointer]),
            ("utt_relation", pointer, [pointer, text]),
            ("relation_head", pointer, [pointer]),
            ("item_next", pointer, [pointer]),
            ("ffeature_float", ctypes.c_float, [pointer, text]),
            ("ffeature_string", text, [pointer, text]),
            ("utt_wave", ctypes.POINTER(_Wave), [pointer]),
            ("delete_utterance", None, [pointer]),
            ("flite_feat_set_float", None, [pointer, text, ctypes.c_float]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.flite_init()

    @cache  # noqa: B019 - one instance per process
    def _voice(self, name: str) -> tuple[int, int]:
        """Return the addresses of the voice and of its features, the second field of cst_voice."""
        register = getattr(_load(f"libflite_cmu_us_{name}.so.1"), f"register_cmu_us_{name}")
        register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        voice = register(None)
        fields = ctypes.cast(voice, ctypes.POINTER(ctypes.c_void_p * 2)).contents
        return voice, int(fields[1] or 0)

    def speak(self, text: str, manner: Manner) -> _Raw:
        lib = self._lib
        voice, features = self._voice(manner.voice)
        lib.flite_feat_set_float(features, b"duration_stretch", manner.stretch)
        utterance = lib.flite_synth_text(text.encode(), voice)
        if not utterance:
            raise RefusedError(f"flite could not speak {text!r}")
        try:
            wave = lib.utt_wave(utterance).contents
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            sample_rate = int(wave.sample_rate)
            sounds = [
                (
                    lib.ffeature_string(item, b"name").decode(),
                    float(lib.ffeature_float(item, b"end")),
                )
                for item in self._items(utterance, b"Segment")
            ]
            ends = [
                float(lib.ffeature_float(i, _WORD_END)) for i in self._items(utterance, b"Word")
            ]
        finally:
            lib.delete_utterance(utterance)
        # The clock of the segments may run past the samples by a frame or two: one scale for both.
        starts = [(0, sounds[0][1] if sounds[0][0] == "pau" else 0.0)]
        starts += [(i + 1, end) for i, end in enumerate(ends[:-1])]
        if len(ends) != len(text.split()):
            starts = starts[:1]
        return _Raw(samples, sample_rate, starts, sounds)

    def _items(self, utterance: int, relation: bytes) -> list[int]:
        items = []
        item = self._lib.relation_head(self._lib.utt_relation(utterance, relation))
        while item:
            items.append(item)
            item = self._lib.item_next(item)
        return items


_espeak, _flite = cache(_Espeak), cache(_Flite)  # each starts on first use


def speak(text: str, manner: Manner) -> Spoken:
    """Speak a text with its marks, and cut the sound to `EDGE_FRAMES` around its phones. Raises
    SynthesisError, of which RefusedError is a kind.
    """
    library = _flite() if manner.voice in FLITE_VOICES else _espeak()
    return _finish(corpus.written(text), library.speak(text.lower(), manner), manner)


def _finish(text: str, raw: _Raw, manner: Manner) -> Spoken:
    ratio = manner.pitch_ratio  # played faster by this: shorter, and higher in pitch
    audio = soxr.resample(
        raw.samples.astype(np.float32), raw.sample_rate * ratio, SAMPLE_RATE, quality="HQ"
    )
    sounds = [(name, end / ratio) for name, end in raw.sounds]
    voiced = [i for i, (name, _) in enumerate(sounds) if name not in SILENT_SOUNDS]
    if not voiced:
        raise RefusedError(f"{manner.voice} said nothing for {text!r}")
    start_s = sounds[voiced[0] - 1][1] if voiced[0] else 0.0
    end_s = min(sounds[voiced[-1]][1], len(audio) / SAMPLE_RATE)

    first = max(0, round(start_s / FRAME_S) - EDGE_FRAMES)
    last = round(end_s / FRAME_S) + EDGE_FRAMES
    n_frames = last - first
    cut = np.zeros(n_frames * FRAME_SAMPLES, dtype=np.float32)
    piece = audio[first * FRAME_SAMPLES : last * FRAME_SAMPLES]
    cut[: len(piece)] = piece
    cut *= PEAK * 32767 / max(1.0, float(np.abs(cut).max()))

    names = [""] * n_frames
    begin = 0
    for name, end in sounds:
        stop = min(n_frames, max(begin, round(end / FRAME_S) - first))
        if name not in SILENT_SOUNDS:
            names[begin:stop] = [name] * (stop - begin)
        begin = stop
    starts = [(i, at / ratio / FRAME_S - first) for i, at in raw.word_starts]
    frames = _word_frames(text.split(), starts, n_frames)
    return Spoken(text, manner.voice, cut.astype(np.int16), frames, names)


def _word_frames(
    words: list[str], starts: list[tuple[int, float]], n_frames: int
) -> npt.NDArray[np.int32]:
    """Return each word's start and end frame; words without a time share by their letters."""
    known = dict(reversed(starts))  # the first time a word is named counts
    known[0] = EDGE_FRAMES
    known[len(words)] = n_frames - EDGE_FRAMES
    edges = np.zeros(len(words) + 1)
    anchors = sorted(known)
    for left, right in pairwise(anchors):
        letters = np.cumsum([0] + [len(w) for w in words[left:right]])
        edges[left : right + 1] = known[left] + (known[right] - known[left]) * letters / letters[-1]
    rounded = np.maximum.accumulate(np.round(edges)).astype(np.int32)
    return np.stack([rounded[:-1], rounded[1:]], axis=1)
