"""How many windows an encoder's export pool holds, given its other needs of GPU memory."""

from __future__ import annotations

import math

from cluster.common.kv.connect import served_layout
from cluster.common.kv.cross_kv import WINDOWS_AT_ONCE
from cluster.common.kv.layout import ITEM_BYTES, window_bytes
from cluster.common.kv.pool import GpuBudget, pool_windows
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.model.dims import ModelDims, cross_kv_shapes, encoder_shapes
from cluster.common.settings import EncoderSettings, Settings
from encoder_worker.engine import auto_batch
from encoder_worker.mel import ROW_SAMPLES

POOL_BATCHES = 4  # most batches in the export pool, as published KV is soon read
_MEL_FLOATS = 6 * 201 * 3002  # per window: complex spectrum, power, and what they are made of


def sized(
    settings: Settings,
    checkpoint: Checkpoint,
    device: str,
    budget: GpuBudget | None,
    portion: float = 1.0,  # of the room left, where the other role's pool follows
) -> Settings:
    """Fill in the export pool's size; raises ConfigurationError where it does not fit."""
    role = settings.encoder
    n_windows = pool_windows(
        "encoder.export_windows",
        role.export_windows,
        POOL_BATCHES * _max_batch(role, device),
        _window_bytes(settings, checkpoint, device),
        budget,
        {} if budget is None else _needs(settings, checkpoint.dims, device),
        portion,
    )
    encoder = role.model_copy(update={"export_windows": n_windows})
    return settings.model_copy(update={"encoder": encoder})


def taken_bytes(settings: Settings, checkpoint: Checkpoint, device: str) -> int:
    """Bytes of GPU memory that an encoder with these sized settings takes."""
    pool = settings.encoder.export_windows * _window_bytes(settings, checkpoint, device)
    return pool + sum(_needs(settings, checkpoint.dims, device).values())


def _window_bytes(settings: Settings, checkpoint: Checkpoint, device: str) -> int:
    return window_bytes(served_layout(checkpoint, settings, device))


def weight_bytes(dims: ModelDims, dtype: str) -> int:
    shapes = encoder_shapes(dims) | cross_kv_shapes(dims)
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES[dtype]


def _max_batch(role: EncoderSettings, device: str) -> int:
    return role.max_batch or auto_batch(device)


def _needs(settings: Settings, dims: ModelDims, device: str) -> dict[str, int]:
    role, d, frames = settings.encoder, dims.n_audio_state, dims.n_audio_ctx
    dtype, max_batch = resolve_dtype(role.dtype, device), _max_batch(role, device)
    item = ITEM_BYTES[dtype]
    # At its widest a layer holds the residual stream, its norm, and the hidden state (4 d) before
    # and after GELU. The largest graph counts, as the smaller ones share its memory.
    layer = max_batch * frames * 10 * d * item
    kv_width = 2 * dims.n_text_layer * dims.n_text_state
    projected = min(max_batch, WINDOWS_AT_ONCE) * frames * kv_width * item
    mel = max_batch * (4 * _MEL_FLOATS + 3 * 4 * ROW_SAMPLES)
    batches = layer + projected + mel
    return {"weights": weight_bytes(dims, dtype), f"batches of {max_batch}": batches}
