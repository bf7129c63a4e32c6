"""Archives: pieces of the recordings in every container, and broken files."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from tests.support.audio.sounds import FORMATS, cut, encode, write_video
from tests.support.audio.speech import pcm_of

KINDS = [name for name in FORMATS if name not in ("alac", "wav24", "wav32f", "mulaw")]
SHORTEST_S, LONGEST_S = 3.0, 10.0
PICTURE = (  # a PNG of one point
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    folder: Path
    talks: tuple[Path, ...]
    broken: tuple[Path, ...]


def make_files(folder: Path, n_files: int, n_broken: int) -> ArchiveFiles:
    talks = tuple(_talk(folder, i) for i in range(n_files - n_broken))
    return ArchiveFiles(folder, talks, tuple(_broken(folder, i) for i in range(n_broken)))


def _talk(folder: Path, number: int) -> Path:
    rng = np.random.default_rng(number)
    speech = pcm_of("long")
    n_samples = int(rng.uniform(SHORTEST_S, LONGEST_S) * SAMPLE_RATE)
    begin = int(rng.integers(len(speech) - n_samples))
    kind = KINDS[number % len(KINDS)]
    target = folder / f"{number // 10:02d}" / f"talk-{number:03d}.{kind}"
    target.parent.mkdir(parents=True, exist_ok=True)
    return encode(target, speech[begin : begin + n_samples], *FORMATS[kind])


def _without_an_index(path: Path) -> None:
    """An MP4's table of frames stands at its end."""
    whole = encode(path.with_suffix(".whole"), pcm_of("short"), *FORMATS["m4a"])
    cut(whole, 0.5).rename(path)
    whole.unlink()


BROKEN: tuple[tuple[str, bytes | Callable[[Path], object]], ...] = (
    (".mp3", b"this is no audio " * 100),
    (".wav", b""),
    (".wav", wav_bytes(np.zeros(0, np.int16))),
    (".webm", base64.b64decode(PICTURE)),
    (".mp4", lambda path: write_video(path, None)),
    (".m4a", _without_an_index),
    (".ogg", b"<html><body>404 Not Found</body></html>"),
    (".flac", bytes(50_000)),
)


def _broken(folder: Path, number: int) -> Path:
    suffix, content = BROKEN[number % len(BROKEN)]
    path = folder / f"broken-{number}{suffix}"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    return path
