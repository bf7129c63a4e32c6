"""Where nobody speaks splitscribe writes nothing that openai-whisper would not on the same weights.

`-s` shows how many words of each answer nobody said.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.checkpoint import open_checkpoint
from cluster.demo.samples import sample_text, words_of
from router.api.params import TranscriptionParams
from router.interface import TranscriptionResult
from router.transcriber import RequestTranscriber
from tests.support.audio.speech import pcm_of, sentence_pcm, sentences_of
from tests.support.references.transcribers import float32_transcriber, ours, theirs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

Signal = NDArray[np.float64]  # [n_samples], full scale is 1

DEMO = open_checkpoint("demo").path
DEFAULTS = TranscriptionParams(model="demo", seed=0)
SAID, SAID_BOTH = sentences_of("short")[0].text, sample_text("short")
TALK = " ".join(sample_text(name) for name in ("medium", "short", "medium"))
LONG_S = 600.0


def seconds_of(seconds: float) -> Signal:
    return np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE


def white(seconds: float, level_db: float, seed: int = 0) -> Signal:
    """Noise with an effective value of `level_db` below full scale."""
    n_samples = round(seconds * SAMPLE_RATE)
    return 10 ** (level_db / 20) * np.random.default_rng(seed).standard_normal(n_samples)


def pink(seconds: float, level_db: float, seed: int = 0) -> Signal:
    spectrum = np.fft.rfft(white(seconds, 0.0, seed))
    spectrum /= np.sqrt(np.maximum(1, np.arange(spectrum.shape[0])))
    noise = np.fft.irfft(spectrum)
    return noise * (10 ** (level_db / 20) / noise.std())


def note(hz: float, seconds: float) -> Signal:
    """A plucked string: harmonics that die away, the higher the sooner."""
    t = seconds_of(seconds)
    return np.asarray(
        sum(np.exp(-(1.5 + 0.8 * k) * t) * np.sin(2 * np.pi * k * hz * t) / k for k in range(1, 8))
    )


def chords(seconds: float) -> Signal:
    roots_hz = (220.0, 174.6, 261.6, 196.0)
    n_chords = round(seconds / 2)
    played = (
        sum(note(roots_hz[i % 4] * ratio, 2.0) for ratio in (1.0, 1.26, 1.498))
        for i in range(n_chords)
    )
    return 0.15 * np.concatenate([np.asarray(chord) for chord in played])


def mains(seconds: float, hz: float, level_db: float = -20.0) -> Signal:
    t = seconds_of(seconds)
    hum = sum(np.sin(2 * np.pi * hz * k * t + k) / k for k in range(1, 12))
    return np.asarray(10 ** (level_db / 20) * hum) + white(seconds, -70.0)


def clicks(seconds: float, per_s: float = 1.5) -> Signal:
    rng = np.random.default_rng(5)
    signal = white(seconds, -75.0)
    crack = np.exp(-np.arange(160) / 25.0)
    for at in rng.integers(0, signal.shape[0] - 160, round(seconds * per_s)):
        signal[at : at + 160] += rng.uniform(0.2, 0.9) * crack * rng.standard_normal(160)
    return signal


def babble(seconds: float) -> Signal:
    """Six readers at once, none of whom can be made out: the voice detector takes it for speech."""
    text = speech("long")
    n_samples = round(seconds * SAMPLE_RATE)
    shifts = np.random.default_rng(6).integers(0, text.shape[0] - n_samples, 6)
    voices = (text[at : at + n_samples][::-1] for at in shifts)
    return np.asarray(sum(voices)) / 2.5


def speech(name: str) -> Signal:
    return pcm_of(name) / 32_768


def sentence_in(signal: Signal, at_s: float) -> Signal:
    """The short recording's first sentence, laid over the signal."""
    said = sentence_pcm("short", 0, margin_s=0.1) / 32_768
    laid, at = signal.copy(), round(at_s * SAMPLE_RATE)
    laid[at : at + said.shape[0]] += said
    return laid


def after_speech(signal: Signal) -> Signal:
    return np.concatenate((speech("short"), signal))


def around(signal: Signal) -> Signal:
    return np.concatenate((speech("short"), signal, speech("short")))


def talk_with(signal: Signal) -> Signal:
    medium, short = speech("medium"), speech("short")
    return np.concatenate((medium, signal, short, signal, medium))


def clipped(signal: Signal, gain_db: float) -> Signal:
    return np.clip(signal * 10 ** (gain_db / 20), -1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Sound:
    name: str
    make: Callable[[], Signal]
    said: str = ""

    @property
    def pcm(self) -> Pcm:
        return np.asarray(np.clip(self.make(), -1.0, 1.0) * 32_767, np.int16)


QUICK = (
    Sound("silence, 12 s", lambda: np.zeros(12 * SAMPLE_RATE)),
    *(Sound(f"white noise, {db} dB", lambda db=db: white(12.0, db)) for db in (-60, -30, -8)),  # type: ignore[misc]
    *(Sound(f"pink noise, {db} dB", lambda db=db: pink(12.0, db)) for db in (-60, -30, -8)),  # type: ignore[misc]
    Sound("white noise, clipped", lambda: clipped(white(12.0, -20.0), 30.0)),
    Sound("pink noise, clipped", lambda: clipped(pink(12.0, -20.0), 30.0)),
    Sound("chords", lambda: chords(12.0)),
    Sound("hum, 50 Hz", lambda: mains(12.0, 50.0)),
    Sound("hum, 60 Hz", lambda: mains(12.0, 60.0, -8.0)),
    Sound("clicks", lambda: clicks(12.0)),
    Sound("babble", lambda: babble(12.0)),
    Sound("speech backwards", lambda: speech("short")[::-1]),
    Sound("speech, clipped", lambda: clipped(speech("short"), 12.0), SAID_BOTH),
    Sound("speech, clipped hard", lambda: clipped(speech("short"), 30.0), SAID_BOTH),
    Sound("speech, then hum", lambda: after_speech(mains(20.0, 60.0, -14.0)), SAID_BOTH),
    Sound("speech, then chords, then speech", lambda: around(chords(6.0)), f"{SAID_BOTH} " * 2),
    Sound("speech, then noise, then speech", lambda: around(pink(6.0, -26.0)), f"{SAID_BOTH} " * 2),
    Sound(
        "a sentence, then a minute of silence",
        lambda: sentence_in(np.zeros(60 * SAMPLE_RATE), 2.0),
        SAID,
    ),
    Sound(
        "a sentence in ten minutes of silence",
        lambda: sentence_in(np.zeros(round(LONG_S * SAMPLE_RATE)), 311.7),
        SAID,
    ),
)
LONG = (
    Sound("talk with chords", lambda: talk_with(chords(6.0)), TALK),
    Sound("talk with hum", lambda: talk_with(mains(6.0, 60.0, -14.0)), TALK),
    Sound("talk with noise", lambda: talk_with(pink(6.0, -20.0)), TALK),
    Sound(
        "a sentence in ten minutes of pink noise",
        lambda: sentence_in(pink(LONG_S, -45.0), 102.3),
        SAID,
    ),
    Sound(
        "a sentence in ten minutes of hum",
        lambda: sentence_in(mains(LONG_S, 50.0, -40.0), 590.0),
        SAID,
    ),
)


def invented(said: str, heard: str) -> int:
    """Words that nobody said there, by the alignment with the fewest word errors."""
    reference, found = " ".join(words_of(said)), " ".join(words_of(heard))
    if not reference:
        return len(found.split())
    return len(found.split()) - int(jiwer.process_words(reference, found).hits)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber() as transcriber:
        yield transcriber


async def listen(
    transcriber: RequestTranscriber, sounds: Iterable[Sound], folder: Path
) -> dict[Sound, TranscriptionResult]:
    """What we hear in each, after comparing it with the reference.

    How many words a model makes of a sound that is none is luck; whether it makes any is not.
    """
    heard, n_mine, n_theirs = {}, 0, 0
    for sound in sounds:
        pcm = sound.pcm
        heard[sound] = await ours(transcriber, DEFAULTS, pcm, folder)
        text = heard[sound].transcript.text
        mine, reference = (invented(sound.said, one) for one in (text, theirs(DEMO, pcm)))
        print(f"{sound.name}: {mine} words that nobody said, {reference} there: {text[:60]!r}")
        assert reference or not mine, (sound.name, text)
        n_mine, n_theirs = n_mine + mine, n_theirs + reference
    assert n_mine <= n_theirs
    return heard


async def test_nothing_is_invented_that_the_reference_does_not_invent(
    transcriber: RequestTranscriber, tmp_path: Path
) -> None:
    heard = await listen(transcriber, (*QUICK[2::4], QUICK[-2]), tmp_path)
    silent = [one.timings.windows for sound, one in heard.items() if not sound.said]
    assert any(silent), "the gates were not asked"
    for sound, one in heard.items():
        if sound.said == SAID:
            assert words_of(one.transcript.text) == words_of(SAID), sound.name


@pytest.mark.slow
async def test_all_sounds_and_long_ones_are_no_richer_in_words(
    transcriber: RequestTranscriber, tmp_path: Path
) -> None:
    await listen(transcriber, QUICK + LONG, tmp_path)
