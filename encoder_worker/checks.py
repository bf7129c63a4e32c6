"""Checks what an encoder engine is given, at start and per window, and types its failures."""

from __future__ import annotations

import math

import numpy as np

from cluster.errors import (
    ConfigurationError,
    InvalidAudioError,
    SequenceFailedError,
    WorkerError,
)
from cluster.kv.exporter import KVExporter
from cluster.kv.layout import KVLayout
from cluster.messages import (
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    WINDOW_SAMPLES,
    EncodeRequest,
    FileMel,
    Pcm,
)
from cluster.model.checkpoint import Checkpoint
from cluster.model.encoder_context import SAMPLES_PER_POSITION


def check_request(request: EncodeRequest, n_audio_ctx: int) -> None:
    """Raise InvalidAudioError unless samples and context are what `EncodeRequest` promises."""
    _check_pcm(request)
    context = request.context
    if not 0 <= context <= n_audio_ctx:
        raise InvalidAudioError(f"a context has 0 to {n_audio_ctx} positions, got {context}")
    if context and request.n_samples > context * SAMPLES_PER_POSITION:
        raise InvalidAudioError(
            f"{request.n_samples} samples do not fit a context of {context} positions"
        )


def _check_pcm(request: EncodeRequest) -> None:
    pcm = request.pcm
    if request.file_mel is not None:
        _check_slice(pcm, request.file_mel)
        return
    if pcm.dtype != np.int16 or pcm.ndim != 1 or not 1 <= pcm.shape[0] <= WINDOW_SAMPLES:
        raise InvalidAudioError(
            f"a window is int16 [1..{WINDOW_SAMPLES}], got {pcm.dtype} {list(pcm.shape)}"
        )


def _check_slice(pcm: Pcm, file_mel: FileMel) -> None:
    n_before, n_frames = file_mel.n_before, file_mel.n_frames
    if pcm.dtype != np.int16 or pcm.ndim != 1:
        raise InvalidAudioError(f"a window is int16 [n], got {pcm.dtype} {list(pcm.shape)}")
    if n_before % HOP_LENGTH or not 0 <= n_before <= MEL_CONTEXT_SAMPLES:
        raise InvalidAudioError(
            f"the context before a window is a multiple of {HOP_LENGTH} up to "
            f"{MEL_CONTEXT_SAMPLES} samples, got {n_before}"
        )
    if not 1 <= n_frames <= WINDOW_SAMPLES // HOP_LENGTH or not math.isfinite(file_mel.log_max):
        raise InvalidAudioError(
            f"a window has 1 to {WINDOW_SAMPLES // HOP_LENGTH} mel frames below a finite maximum, "
            f"got {n_frames} and {file_mel.log_max}"
        )
    most = n_before + n_frames * HOP_LENGTH + MEL_CONTEXT_SAMPLES
    if not n_before < pcm.shape[0] <= most:
        raise InvalidAudioError(
            f"a window of {n_frames} mel frames with {n_before} samples before it has "
            f"{n_before + 1} to {most} samples, got {pcm.shape[0]}"
        )


def check_layout(checkpoint: Checkpoint, exporter: KVExporter) -> None:
    """Raise ConfigurationError unless the exporter's pages are for this checkpoint."""
    layout, dims = exporter.layout, checkpoint.dims
    expected: tuple[int, ...]
    found: tuple[int, ...]
    if isinstance(layout, KVLayout):
        expected = (dims.n_text_layer, dims.n_text_head, dims.text_head_dim, dims.n_audio_ctx)
        found = (layout.n_layer, layout.n_head, layout.head_dim, layout.n_frames)
    else:
        expected = (dims.n_audio_state, dims.n_audio_ctx)
        found = (layout.n_state, layout.n_frames)
    if found != expected or layout.model != checkpoint.fingerprint:
        raise ConfigurationError(
            f"the exporter's layout is of another checkpoint: its {layout.payload} has sizes "
            f"{found}, expected {expected}"
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
