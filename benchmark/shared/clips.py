"""Recordings with their references: a folder, a Hugging Face dataset, or demo utterances.

    folder    name.wav beside name.txt
    dataset   any on the Hub or in a local folder that `datasets` loads; needs that package
    demo      the recordings that ship with the package, or new utterances by the demo model's own
              voices (needs espeak-ng and flite)

New utterances are made once and kept in a cache folder.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import ExampleMaker
from benchmark.shared.speech.synthesis import SynthesisError
from benchmark.shared.speech.wav import to_pcm, wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import SAMPLES, sample_path, sample_text

AUDIO_SUFFIXES = frozenset(
    (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm", ".aac")
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "splitscribe/benchmark"
TEXT_KEYS = ("text", "sentence", "transcription", "transcript", "normalized_text")


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording as a client would upload it; `reference` is what is said."""

    name: str
    audio: Path | bytes
    reference: str | None = None

    def read(self) -> bytes:
        return self.audio if isinstance(self.audio, bytes) else self.audio.read_bytes()

    def pcm(self) -> NDArray[np.int16]:
        """Decode to int16 [n_samples], mono, 16 kHz."""
        source = io.BytesIO(self.audio) if isinstance(self.audio, bytes) else str(self.audio)
        resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        parts: list[NDArray[np.int16]] = []
        with av.open(source, "r") as container:
            for frame in container.decode(audio=0):
                parts += [part.to_ndarray()[0] for part in resampler.resample(frame)]
            parts += [part.to_ndarray()[0] for part in resampler.resample(None)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def add_clip_flags(parser: argparse._ActionsContainer) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, help="audio files with their references")
    source.add_argument("--hf-dataset", metavar="NAME", help="on the Hub, or a local folder")
    source.add_argument("--demo", type=int, metavar="N", help="that many demo utterances")
    parser.add_argument("--hf-split", default="test", metavar="NAME", help="default: test")


def clips_of(args: argparse.Namespace) -> list[Clip]:
    if args.folder:
        found = folder_clips(args.folder)
    elif args.hf_dataset:
        found = list(dataset_clips(args.hf_dataset, args.hf_split))
    elif args.demo:
        found = demo_clips(args.demo)
    else:
        found = [Clip(name, sample_path(name), sample_text(name)) for name in SAMPLES]
    if not found:
        raise SystemExit("there is no recording to send")
    return found


def folder_clips(folder: Path) -> list[Clip]:
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no folder")
    clips = []
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in AUDIO_SUFFIXES:
            text = file.with_suffix(".txt")
            reference = text.read_text().strip() if text.is_file() else None
            clips.append(Clip(str(file.relative_to(folder)), file, reference))
    return clips


def dataset_clips(name: str, split: str) -> Iterator[Clip]:
    """Yield a dataset's audio as it is stored, neither decoded nor resampled."""
    try:
        import datasets
    except ImportError:
        raise SystemExit("--hf-dataset needs a package: pip install datasets") from None
    rows = datasets.load_dataset(name, split=split, streaming=True)
    features = rows.features or {}
    column = next((key for key, kind in features.items() if isinstance(kind, datasets.Audio)), None)
    if column is None:
        raise SystemExit(f"{name} has no audio column; it has {', '.join(features)}")
    texts = next((key for key in TEXT_KEYS if key in features), None)
    if texts is None:
        raise SystemExit(f"{name} has none of {', '.join(TEXT_KEYS)}; it has {', '.join(features)}")
    rows = rows.cast_column(column, datasets.Audio(decode=False))
    for index, row in enumerate(rows):
        audio = row[column]
        data = audio["bytes"] if audio["bytes"] is not None else Path(audio["path"])
        suffix = Path(audio["path"] or "audio.wav").suffix
        yield Clip(f"{index:05}{suffix}", data, str(row[texts]))


def demo_clips(n: int) -> list[Clip]:
    """Return utterances from a seed that training never used; they are kept in a cache folder."""
    files = [CACHE / "demo-utterances" / f"{index:05}.wav" for index in range(n)]
    if not all(file.with_suffix(".txt").is_file() for file in files):
        _make_demo_clips(files)
    return [Clip(file.name, file, file.with_suffix(".txt").read_text()) for file in files]


def _make_demo_clips(files: list[Path]) -> None:
    print(f"making {len(files)} demo recordings in {files[0].parent}", flush=True)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    try:
        kinds = (
            (ExampleMaker("made"), corpus.made_sentence),
            (ExampleMaker("free"), corpus.free_order),
        )
        for index, file in enumerate(files):
            maker, text = kinds[index % 2]
            example = maker.alone(text)
            file.write_bytes(wav_bytes(to_pcm(example.audio)))
            file.with_suffix(".txt").write_text(example.text)  # last: it says the clip is whole
    except SynthesisError as error:
        raise SystemExit(str(error)) from error


class UniqueFiles:
    """Files of one recording, each with noise of one 16-bit step, so that no result is cached."""

    def __init__(self, folder: Path, recording: str) -> None:
        self._folder = folder
        self._pcm = np.clip(Clip(recording, sample_path(recording)).pcm(), -32_767, 32_766)
        self._rng = np.random.default_rng(0)
        self._n_made = 0

    def take(self, n: int) -> list[Path]:
        files = []
        for _ in range(n):
            files.append(self._folder / f"{self._n_made}.wav")
            noise = self._rng.integers(-1, 2, len(self._pcm), dtype=np.int16)
            files[-1].write_bytes(wav_bytes(self._pcm + noise))
            self._n_made += 1
        return files
