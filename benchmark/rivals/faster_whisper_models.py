"""faster-whisper on our checkpoints: in CTranslate2's format, and decoding as the server does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmark.shared.clips import CACHE
from cluster.common.model.tensor_files import BUNDLED_FOLDER

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
    """The checkpoint in CTranslate2's format; made once.

    Beside it, or where benchmarks keep their files for the bundled one, of which there are several
    in the course of time.
    """
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
    """It takes a model for English-only if its vocabulary is smaller than the published ones."""
    import faster_whisper.transcribe as library

    if not isinstance(library.Tokenizer, partial):
        patch.object(library, "Tokenizer", partial(_multilingual, library.Tokenizer)).start()


def _multilingual(tokenizer: Callable[..., Any], vocabulary: Any, _: bool, **options: Any) -> Any:
    return tokenizer(vocabulary, True, **options)


def suppressed(converted: Path) -> list[int]:
    """The checkpoint's own list, which the conversion keeps."""
    listed = json.loads((converted / "config.json").read_text())["suppress_ids"]
    return [int(token) for token in listed]


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
