"""Open a Whisper checkpoint in Hugging Face's layout: its configs, and where its tensors are.

Imports no torch, because the router opens checkpoints for their tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.common.errors import CheckpointError
from cluster.common.messages import HOP_LENGTH, SAMPLE_RATE
from cluster.common.model.dims import ModelDims
from cluster.common.model.tensor_files import (
    TensorEntry,
    content_digest,
    index_tensors,
    locate,
    read_json,
    weight_files,
)

# Short-time Fourier transform of every Whisper checkpoint.
N_FFT = 400  # samples, 25 ms


@dataclass(frozen=True)
class Checkpoint:
    """`name` is what the user asked for. A mapping is empty where its file is absent."""

    name: str
    path: Path
    dims: ModelDims
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    preprocessor_config: Mapping[str, Any]

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """All tensors by their names without `model.`. Raises CheckpointError."""
        return index_tensors(weight_files(self.path))

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of shapes and weights, the same on every host that has the checkpoint."""
        digest = hashlib.sha256(repr(sorted(asdict(self.dims).items())).encode())
        digest.update(content_digest(self.tensors).encode())
        return digest.hexdigest()[:32]

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, path={str(self.path)!r})"


def open_checkpoint(model: str, *, weights: bool = True) -> Checkpoint:
    """Find `model`, download it if it is a Hub id, and read and check its configs.

    `model` is "demo", a folder, openai/whisper's short name, or a Hub id, perhaps with `@revision`.
    Without `weights` the weight files are neither downloaded nor checked. Raises CheckpointError.
    """
    path = locate(model, weights)
    config = read_json(path / "config.json")
    if config is None:
        raise CheckpointError(f"{path} is not a Whisper checkpoint: it has no config.json")
    _check_architecture(path, config)
    checkpoint = Checkpoint(
        name=model,
        path=path,
        dims=ModelDims.from_config(config),
        config=config,
        generation_config=read_json(path / "generation_config.json") or {},
        preprocessor_config=_read_preprocessor(path),
    )
    _check_features(checkpoint)
    if weights:
        weight_files(path)
    return checkpoint


def _read_preprocessor(path: Path) -> dict[str, Any]:
    """Newer files nest the features' settings in processor_config.json."""
    own = read_json(path / "preprocessor_config.json")
    if own is not None:
        return own
    combined = read_json(path / "processor_config.json") or {}
    nested = combined.get("feature_extractor", {})
    return nested if isinstance(nested, dict) else {}


def _check_architecture(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "whisper":
        raise CheckpointError(
            f"{path} is not a Whisper checkpoint: config.json says model_type {kind!r}"
        )
    activation = config.get("activation_function", "gelu")
    if activation != "gelu":
        raise CheckpointError(
            f"{path}: activation_function {activation!r} is not offered, only gelu"
        )


def _check_features(checkpoint: Checkpoint) -> None:
    expected = {
        "n_fft": N_FFT,
        "hop_length": HOP_LENGTH,
        "sampling_rate": SAMPLE_RATE,
        "feature_size": checkpoint.dims.n_mels,
        "nb_max_frames": checkpoint.dims.n_mel_frames,
    }
    for key, value in expected.items():
        found = checkpoint.preprocessor_config.get(key, value)
        if found != value:
            raise CheckpointError(
                f"{checkpoint.path}: preprocessor_config.json has {key} = {found}, "
                f"but this model takes {value}"
            )
