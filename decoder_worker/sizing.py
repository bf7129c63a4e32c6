"""How many rows a decoder's batch has, and how many windows its pool, from shapes alone."""

from __future__ import annotations

import math

from cluster.common.kv.connect import LANDING_WINDOWS, served_kv_layout, served_layout
from cluster.common.kv.layout import ITEM_BYTES, window_bytes
from cluster.common.kv.pool import RESERVE_BYTES, GpuBudget, pool_windows
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.model.dims import ModelDims, cross_kv_shapes, decoder_shapes
from cluster.common.settings import Settings
from decoder_worker.engine import MOST_GPU_ROWS, auto_batch

GPU_ROWS = (MOST_GPU_ROWS, 48, 32, 24, 16, 12, 8, 4, 2, 1)  # as many as fit
POOL_BATCHES = 2  # one runs while the KV of the next is read
_LOGIT_COPIES = 6  # float32 logits, their masks and sorted copies
_WORKSPACE_BYTES = 1 << 30  # attention kernels' plans, 16 MB of each bucket, and split results


def sized(
    settings: Settings, checkpoint: Checkpoint, device: str, budget: GpuBudget | None
) -> Settings:
    """The settings with the batch's and the pool's size filled in; `budget` is None on a CPU.

    Raises ConfigurationError where so many windows do not fit.
    """
    role, needs = settings.decoder, {}
    window = window_bytes(served_kv_layout(checkpoint, settings, device))
    rows = role.max_batch or auto_batch(device)
    if budget is not None:
        dtype = resolve_dtype(role.dtype, device)
        needs["weights"] = weight_bytes(checkpoint.dims, dtype)
        if settings.handoff == "encoder_states":
            needs["encoder states"] = landing_bytes(settings, checkpoint, device)
        if not role.max_batch:
            room = budget.free_bytes - RESERVE_BYTES - sum(needs.values())
            rows = _rows_that_fit(checkpoint.dims, dtype, room, window, role.kv_windows)
        needs[f"{rows} rows"] = working_bytes(checkpoint.dims, dtype, rows)
    n_windows = pool_windows(
        "decoder.kv_windows",
        role.kv_windows,
        POOL_BATCHES * rows,
        window,
        budget,
        needs,
    )
    decoder = role.model_copy(update={"kv_windows": n_windows, "max_batch": rows})
    return settings.model_copy(update={"decoder": decoder})


def _rows_that_fit(dims: ModelDims, dtype: str, room: int, window: int, n_windows: int) -> int:
    """The most rows for which `room` has a window each, or the `n_windows` that are asked for."""
    for rows in GPU_ROWS:
        if working_bytes(dims, dtype, rows) + (n_windows or rows) * window <= room:
            return rows
    return GPU_ROWS[-1]


def weight_bytes(dims: ModelDims, dtype: str) -> int:
    return sum(math.prod(shape) for shape in decoder_shapes(dims).values()) * ITEM_BYTES[dtype]


def landing_bytes(settings: Settings, checkpoint: Checkpoint, device: str) -> int:
    """The landing pool at its largest, and the weights that make KV of what lands."""
    layout = served_layout(checkpoint, settings, device)
    weights = sum(math.prod(shape) for shape in cross_kv_shapes(checkpoint.dims).values())
    return LANDING_WINDOWS * window_bytes(layout) + weights * ITEM_BYTES[layout.dtype]


def working_bytes(dims: ModelDims, dtype: str, max_batch: int) -> int:
    """Self-attention KV of every row, logits and workspaces."""
    self_kv = 2 * dims.n_text_layer * dims.n_text_ctx * dims.n_text_state * ITEM_BYTES[dtype]
    logits = _LOGIT_COPIES * dims.n_vocab * 4
    return max_batch * (self_kv + logits) + _WORKSPACE_BYTES
