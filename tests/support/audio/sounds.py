"""Sounds and files for the audio tests: a voice made from formants, and every container."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import av
import numpy as np

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.protocol import AudioLimits
from tests.support.programs import require

VOWELS_HZ = (
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (570, 840, 2410),
)
LIMITS = AudioLimits(
    max_upload_bytes=26_214_400,
    max_audio_s=4 * 3600.0,
    min_audio_s=0.1,
    max_busy_s=120.0,
    memory_bytes=2**30,
)
FORMATS = {
    "flac": ("flac", "flac", 44_100),
    "mp3": ("mp3", "libmp3lame", 44_100),
    "mpga": ("mp2", "mp2", 44_100),
    "mp4": ("mp4", "aac", 44_100),
    "m4a": ("ipod", "aac", 48_000),
    "alac": ("ipod", "alac", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
    "oga": ("oga", "flac", 44_100),
    "opus": ("opus", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "pcm_s16le", 22_050),
    "mpeg": ("mpeg", "mp2", 44_100),
    "aac": ("adts", "aac", 44_100),
    "wav": ("wav", "pcm_s16le", 44_100),
    "wav24": ("wav", "pcm_s24le", 48_000),
    "wav32f": ("wav", "pcm_f32le", 48_000),
    "mulaw": ("wav", "pcm_mulaw", 8_000),
}  # name: libav's muxer, encoder, rate


@functools.cache
def _syllables(seconds: float) -> Pcm:
    rng = np.random.default_rng(1)
    signal = np.zeros(round(seconds * SAMPLE_RATE))
    at = 0
    while at < signal.shape[0]:
        length = int(rng.uniform(0.12, 0.22) * SAMPLE_RATE)
        pitch_hz = rng.uniform(100, 140)
        wobble = 1 + 0.1 * np.sin(6 * np.pi * np.arange(length) / SAMPLE_RATE)
        phase = 2 * np.pi * np.cumsum(pitch_hz * wobble) / SAMPLE_RATE
        formants_hz = VOWELS_HZ[rng.integers(len(VOWELS_HZ))]
        syllable = np.zeros(length)
        for harmonic in range(1, 30):
            hz = harmonic * pitch_hz
            weights = zip(formants_hz, (1, 0.5, 0.25), strict=True)
            gain = sum(w * np.exp(-(((hz - f) / (80 + 0.05 * f)) ** 2)) for f, w in weights)
            syllable += (gain + 0.01) * np.sin(harmonic * phase)
        syllable *= np.sqrt(np.hanning(length))
        end = min(signal.shape[0], at + length)
        signal[at:end] += syllable[: end - at]
        at += length + int(rng.uniform(0, 0.03) * SAMPLE_RATE)
    return (signal / np.abs(signal).max() * 12_000).astype(np.int16)


def voice(seconds: float) -> Pcm:
    """int16 [n_samples]: speech-like sound without a pause."""
    tile = _syllables(20.0)
    n_samples = round(seconds * SAMPLE_RATE)
    return np.tile(tile, -(-n_samples // tile.shape[0]))[:n_samples]


def silence(seconds: float) -> Pcm:
    return np.zeros(round(seconds * SAMPLE_RATE), np.int16)


def tone(seconds: float, hz: float = 440.0) -> Pcm:
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (8_000 * np.sin(2 * np.pi * hz * t)).astype(np.int16)


def joined(*parts: Pcm) -> Pcm:
    return np.concatenate(parts)


def espeak(text: str, name: str = "en-us") -> Pcm:
    require("espeak-ng")
    return _spoken(text, name)


@functools.cache
def _spoken(text: str, name: str) -> Pcm:
    wav = subprocess.run(
        ["espeak-ng", "-v", name, "--stdout", text], check=True, capture_output=True
    ).stdout
    pcm = np.frombuffer(wav[44:], np.int16)  # 22050 Hz mono, after a plain header
    return resampled(pcm, 22_050, SAMPLE_RATE)


def resampled(pcm: Pcm, rate: int, to_rate: int) -> Pcm:
    frame = _frame(pcm, rate)
    resampler = av.AudioResampler("s16", "mono", to_rate)
    pieces = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([piece.to_ndarray()[0] for piece in pieces])


def _frame(pcm: Pcm, rate: int) -> av.AudioFrame:
    planes = np.ascontiguousarray(np.atleast_2d(pcm))
    layout = "mono" if pcm.ndim == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(planes, format="s16p", layout=layout)
    frame.sample_rate = rate
    frame.pts = 0
    return frame


def write_wav(path: Path, pcm: Pcm, rate: int = SAMPLE_RATE) -> Path:
    path.write_bytes(wav_bytes(pcm, rate))
    return path


def encode(
    path: Path,
    pcm: Pcm,
    muxer: str,
    codec: str,
    rate: int,
    layout: str = "mono",
    options: dict[str, str] | None = None,
    bit_rate: int | None = None,
) -> Path:
    """Write `pcm` (16 kHz, as `_frame` takes it) with any of libav's muxers and encoders."""
    with av.open(str(path), "w", format=muxer, options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        resampler = av.AudioResampler(stream.codec_context.format.name, layout, rate)
        for frame in (*resampler.resample(_frame(pcm, SAMPLE_RATE)), *resampler.resample(None)):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def encode_as(name: str, folder: Path, pcm: Pcm, layout: str = "mono") -> Path:
    muxer, codec, rate = FORMATS[name]
    return encode(folder / f"upload-{name}", pcm, muxer, codec, rate, layout)


def write_video(path: Path, pcm: Pcm | None) -> Path:
    with av.open(str(path), "w", format="mp4") as container:
        video: Any = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        audio: Any = (
            container.add_stream("aac", rate=16_000, layout="mono") if pcm is not None else None
        )
        for index in range(10):
            picture = av.VideoFrame.from_ndarray(
                np.full((64, 64, 3), 20 * index, np.uint8), format="rgb24"
            )
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        if audio is not None and pcm is not None:
            resampler = av.AudioResampler("fltp", "mono", 16_000)
            for frame in resampler.resample(_frame(pcm, SAMPLE_RATE)):
                container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    short = path.with_name(f"{path.name}-cut")
    short.write_bytes(data[: int(len(data) * share)])
    return short
