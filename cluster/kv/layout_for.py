"""The layouts that both roles derive from checkpoint and settings, to agree to the byte."""

from __future__ import annotations

from cluster.errors import ConfigurationError
from cluster.kv.layout import FLOAT8, ITEM_BYTES, KVLayout, PageLayout, StatesLayout
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import resolve_dtype
from cluster.settings import Settings

GPU_PAGE_FRAMES = 125  # 12 pages a window: flashinfer splits long KV by pages


def served_kv_layout(checkpoint: Checkpoint, settings: Settings, device: str) -> KVLayout:
    """Layout of the KV that decoders of a cluster with these settings read.

    Args:
        device: resolved; both roles are on the same kind.

    Raises:
        ConfigurationError: as `kv_layout`.
    """
    dtype: str = settings.kv_dtype
    if dtype == "auto":
        dtype = resolve_dtype(settings.encoder.dtype, device)
    elif dtype == "float8":
        dtype = FLOAT8
    return kv_layout(checkpoint, settings.page_frames, dtype, device)


def served_layout(checkpoint: Checkpoint, settings: Settings, device: str) -> PageLayout:
    """Layout of what a cluster with these settings hands over."""
    if settings.handoff == "cross_kv":
        return served_kv_layout(checkpoint, settings, device)
    return states_layout(checkpoint, resolve_dtype(settings.encoder.dtype, device))


def states_layout(checkpoint: Checkpoint, dtype: str = "float32") -> StatesLayout:
    """Layout of one window's encoder states; `dtype` is the encoder's, resolved."""
    dims = checkpoint.dims
    return StatesLayout(checkpoint.fingerprint, dims.n_audio_state, dims.n_audio_ctx, dtype)


def kv_layout(
    checkpoint: Checkpoint, page_frames: int = 0, dtype: str = "float32", device: str = "cpu"
) -> KVLayout:
    """Layout of one window's cross-attention KV.

    Args:
        page_frames: encoder frames in a page; 0 takes the whole window on a CPU, so that
            attention reads a view without a gather, and `GPU_PAGE_FRAMES` on a GPU.
        dtype: of the KV, resolved (not "auto"); both roles must be given the same.

    Raises:
        ConfigurationError: the page does not divide the window, or no such dtype.
    """
    dims = checkpoint.dims
    if page_frames == 0:
        divides = dims.n_audio_ctx % GPU_PAGE_FRAMES == 0
        page_frames = GPU_PAGE_FRAMES if device != "cpu" and divides else dims.n_audio_ctx
    if not 1 <= page_frames <= dims.n_audio_ctx or dims.n_audio_ctx % page_frames:
        raise ConfigurationError(
            f"page_frames {page_frames} does not divide a window of {dims.n_audio_ctx} frames"
        )
    if dtype not in ITEM_BYTES:
        raise ConfigurationError(f"KV dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    return KVLayout(
        model=checkpoint.fingerprint,
        n_layer=dims.n_text_layer,
        n_head=dims.n_text_head,
        head_dim=dims.text_head_dim,
        n_frames=dims.n_audio_ctx,
        page_frames=page_frames,
        dtype=dtype,
    )
