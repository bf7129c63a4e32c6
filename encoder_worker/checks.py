"""What an encoder engine refuses, at start and per window; and how it reports a failure."""

from __future__ import annotations

import numpy as np

from cluster.errors import (
    ConfigurationError,
    InvalidAudioError,
    SequenceFailedError,
    WorkerError,
)
from cluster.kv.transfer import KVExporter
from cluster.messages import WINDOW_SAMPLES, EncodeRequest
from cluster.model.checkpoint import Checkpoint


def check_pcm(request: EncodeRequest) -> None:
    """Raise InvalidAudioError unless the samples are what `EncodeRequest` promises."""
    pcm = request.pcm
    if pcm.dtype != np.int16 or pcm.ndim != 1 or not 1 <= pcm.shape[0] <= WINDOW_SAMPLES:
        raise InvalidAudioError(
            f"a window is int16 [1..{WINDOW_SAMPLES}], got {pcm.dtype} {list(pcm.shape)}"
        )


def check_layout(checkpoint: Checkpoint, exporter: KVExporter) -> None:
    """Raise ConfigurationError unless the exporter's pages are for this checkpoint."""
    layout, dims = exporter.layout, checkpoint.dims
    expected = (dims.n_text_layer, dims.n_text_head, dims.text_head_dim, dims.n_audio_ctx)
    found = (layout.n_layer, layout.n_head, layout.head_dim, layout.n_frames)
    if found != expected or layout.model != checkpoint.fingerprint:
        raise ConfigurationError(
            f"the KV exporter's layout is of another checkpoint: layers, heads, width and frames "
            f"are {found}, expected {expected}"
        )
    if exporter.pool.n_pages < layout.pages_per_window:
        raise ConfigurationError(
            f"the export pool has {exporter.pool.n_pages} pages, but one window takes "
            f"{layout.pages_per_window}: raise encoder.export_windows"
        )


def as_worker_error(error: Exception) -> Exception:
    """What a window's future fails with: a typed error that keeps its cause."""
    if isinstance(error, WorkerError):
        return error
    failure = SequenceFailedError(f"this window could not be encoded: {error}")
    failure.__cause__ = error
    return failure
