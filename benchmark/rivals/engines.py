"""Other engines on the same checkpoint and the same files, each in a process of its own.

Each reads WAV files and decodes greedily in English, with timestamps and without fallback, prompt
or voice detection: what the server does with `fallback=false`, but without HTTP.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmark.shared.clips import CACHE, Clip
from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.tensor_files import BUNDLED_FOLDER

START_S = 300.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class RivalSpec:
    library: Literal["faster-whisper", "transformers", "openai-whisper"]
    dtype: str
    way: Literal["sequential", "batched"] = "sequential"
    threads: int = 2
    workers: int = 1

    @property
    def name(self) -> str:
        how = f"{self.workers} x {self.threads} threads"
        way = ", batched" if self.way == "batched" else ""
        return f"{self.library} {self.dtype}, {how}{way}"


@dataclass(frozen=True, slots=True)
class Heard:
    """`n_tokens` counts sampled tokens, timestamps included, without end-of-text."""

    text: str
    n_tokens: int


Transcribe = Callable[[Sequence[Path], int], list[Heard]]  # files, in flight


def rival_specs(cores: int) -> list[RivalSpec]:
    """Return each library's fastest set-ups on so many cores."""
    specs: list[RivalSpec] = []
    for dtype in ("int8", "float32"):
        specs.append(RivalSpec("faster-whisper", dtype, threads=cores))
        if cores > 1:
            specs.append(RivalSpec("faster-whisper", dtype, threads=1, workers=cores))
        specs.append(RivalSpec("faster-whisper", dtype, "batched", threads=cores))
    for dtype in ("bfloat16", "float32"):
        specs.append(RivalSpec("transformers", dtype, "batched", threads=cores))
    specs.append(RivalSpec("openai-whisper", "float32", threads=cores))
    return specs


class RivalProcess:
    def __init__(self, spec: RivalSpec, checkpoint: Path) -> None:
        """Raises SystemExit if it does not start."""
        self.name = spec.name
        if spec.library == "faster-whisper":
            checkpoint = convert(checkpoint, spec.dtype)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, spec, checkpoint), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(START_S)

    def run(self, files: Sequence[Path], in_flight: int) -> list[Heard]:
        self._pipe.send((list(files), in_flight))
        heard: list[Heard] = self._receive(None)
        return heard

    def close(self) -> None:
        self._pipe.close()  # the process ends when its pipe is closed
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, timeout_s: float | None) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SystemExit(f"{self.name} took more than {timeout_s} s")
            answer = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name} ended") from None
        if isinstance(answer, str):
            raise SystemExit(f"{self.name}: {answer}")
        return answer


def _child(pipe: Connection, spec: RivalSpec, checkpoint: Path) -> None:
    """Load the rival, send an empty list, then answer with results, or a string after an error."""
    loaders: dict[str, Callable[[RivalSpec, Path], Transcribe]] = {
        "faster-whisper": _faster_whisper,
        "transformers": _transformers,
        "openai-whisper": _openai_whisper,
    }
    try:
        transcribe = loaders[spec.library](spec, checkpoint)
        pipe.send([])
        while True:
            pipe.send(transcribe(*pipe.recv()))
    except EOFError:
        return
    except Exception as error:
        pipe.send(repr(error))
        raise


def _read(file: Path) -> NDArray[np.float32]:
    return Clip(file.name, file).pcm().astype(np.float32) / np.float32(32_768)


def _by_file(one: Callable[[Path], tuple[str, int]], threads: int | None = None) -> Transcribe:
    def transcribe(files: Sequence[Path], in_flight: int) -> list[Heard]:
        with ThreadPoolExecutor(threads or in_flight) as pool:
            return [Heard(text, n_tokens) for text, n_tokens in pool.map(one, files)]

    return transcribe


def _by_batch(many: Callable[[Sequence[Path]], list[tuple[str, int]]]) -> Transcribe:
    def transcribe(files: Sequence[Path], in_flight: int) -> list[Heard]:
        heard: list[Heard] = []
        for first in range(0, len(files), in_flight):
            heard += [Heard(*one) for one in many(files[first : first + in_flight])]
        return heard

    return transcribe


def _faster_whisper(spec: RivalSpec, checkpoint: Path) -> Transcribe:
    import faster_whisper.transcribe as library

    take_as_multilingual()
    model = library.WhisperModel(
        str(checkpoint),
        device="cpu",
        compute_type=spec.dtype,
        cpu_threads=spec.threads,
        num_workers=spec.workers,
    )
    options = {**GREEDY, "suppress_tokens": suppressed(checkpoint)}

    def one(file: Path) -> tuple[str, int]:
        segments = list(model.transcribe(str(file), **options)[0])
        return "".join(s.text for s in segments), sum(len(s.tokens) for s in segments)

    if spec.way == "sequential":
        return _by_file(one)
    pipeline = library.BatchedInferencePipeline(model)

    def many(files: Sequence[Path]) -> list[tuple[str, int]]:
        """Join the files into one, because the pipeline batches clips of one recording."""
        pieces = [library.decode_audio(str(file), sampling_rate=SAMPLE_RATE) for file in files]
        ends = np.cumsum([len(piece) for piece in pieces]) / SAMPLE_RATE
        starts = [0.0, *ends[:-1]]
        clips = [{"start": a, "end": b} for a, b in zip(starts, ends, strict=True)]
        segments, _ = pipeline.transcribe(
            np.concatenate(pieces), clip_timestamps=clips, batch_size=len(files), **options
        )
        texts, counts = [""] * len(files), [0] * len(files)
        for segment in segments:  # its `seek` is the start of its clip, in units of 10 ms
            index = int(np.abs(100 * np.array(starts) - segment.seek).argmin())
            texts[index] += segment.text
            counts[index] += len(segment.tokens)
        return list(zip(texts, counts, strict=True))

    return _by_batch(many)


def _transformers(spec: RivalSpec, checkpoint: Path) -> Transcribe:
    import torch
    from transformers import WhisperForConditionalGeneration

    from cluster.common.model.checkpoint import open_checkpoint
    from cluster.common.model.text.tokenizer import WhisperTokenizer
    from tests.support.references.hugging_face import hf_features

    quiet_transformers()
    torch.set_num_threads(spec.threads)
    dtype = getattr(torch, spec.dtype)
    model = WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype).eval()
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(str(checkpoint)))
    eot = tokenizer.special.eot

    def many(files: Sequence[Path]) -> list[tuple[str, int]]:
        windows = [Clip(file.name, file).pcm() for file in files]
        features = hf_features(checkpoint, windows).to(dtype)
        with torch.inference_mode():
            sequences = model.generate(
                features, return_timestamps=True, language="en", task="transcribe"
            )
        sampled = [[token for token in row if token != eot] for row in sequences.tolist()]
        return [(tokenizer.decode(row), len(row)) for row in sampled]

    return _by_batch(many)


def _openai_whisper(spec: RivalSpec, checkpoint: Path) -> Transcribe:
    import torch
    import whisper

    from tests.support.references.openai_whisper import (
        openai_model,
        openai_vocabulary,
        reference_options,
    )

    torch.set_num_threads(spec.threads)
    model, options = openai_model(checkpoint), reference_options(checkpoint)

    def one(file: Path) -> tuple[str, int]:
        with openai_vocabulary(checkpoint):
            answer = whisper.transcribe(
                model,
                _read(file),
                language="en",
                temperature=0.0,
                compression_ratio_threshold=None,
                logprob_threshold=None,
                no_speech_threshold=None,
                condition_on_previous_text=False,
                **options,
            )
        return answer["text"], sum(len(segment["tokens"]) for segment in answer["segments"])

    return _by_file(one, threads=1)


# Arguments of faster-whisper's `transcribe` for one greedy decode whose result is always taken.
GREEDY: dict[str, Any] = {
    "language": "en",
    "beam_size": 1,
    "best_of": 1,
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous_text": False,
    "without_timestamps": False,
    "vad_filter": False,
}


def convert(checkpoint: Path, dtype: str) -> Path:
    """Convert the checkpoint to CTranslate2's format, once, and return the folder."""
    target = checkpoint.with_name(f"{checkpoint.name}-ctranslate2-{dtype}")
    if checkpoint.resolve() == BUNDLED_FOLDER:
        digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:12]
        target = CACHE / f"{target.name}-{digest}"
    if not (target / "model.bin").is_file():
        from ctranslate2.converters import TransformersConverter

        quiet_transformers()
        copied = ["tokenizer.json", "preprocessor_config.json"]
        converter = TransformersConverter(str(checkpoint), copy_files=copied)
        converter.convert(str(target), quantization=dtype, force=True)
    return target


def take_as_multilingual() -> None:
    """Patch faster-whisper, which takes a model with a small vocabulary for English-only."""
    import faster_whisper.transcribe as library

    if not isinstance(library.Tokenizer, partial):
        patch.object(library, "Tokenizer", partial(_multilingual, library.Tokenizer)).start()


def _multilingual(tokenizer: Callable[..., Any], vocabulary: Any, _: bool, **options: Any) -> Any:
    return tokenizer(vocabulary, True, **options)


def suppressed(converted: Path) -> list[int]:
    """Return the checkpoint's list of suppressed tokens, which the conversion keeps."""
    listed = json.loads((converted / "config.json").read_text())["suppress_ids"]
    return [int(token) for token in listed]


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
