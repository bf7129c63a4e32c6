"""Makes a worker's end of the hand-off from settings: layout, transport, pools.

Both roles derive the same layouts from checkpoint and settings. `available_transport` imports
neither a wire nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.common.errors import ConfigurationError
from cluster.common.kv.layout import FLOAT8, PageLayout
from cluster.common.kv.nixl_wire import load_api
from cluster.common.kv.wire import TransferConfig
from cluster.common.settings import Settings

if TYPE_CHECKING:
    from cluster.common.kv.exporter import KVExporter
    from cluster.common.kv.importer import KVImporter
    from cluster.common.kv.pool import PagePool
    from cluster.common.kv.wire import Wire
    from cluster.common.model.checkpoint import Checkpoint

GPU_PAGE_FRAMES = 125  # 12 pages a window: flashinfer splits long KV by pages
LANDING_WINDOWS = 32  # most windows of states in flight; they leave within milliseconds


def served_kv_layout(checkpoint: Checkpoint, settings: Settings, device: str) -> PageLayout:
    """Layout of the KV that decoders read; `device` is both roles'. Raises as `kv_layout`."""
    dtype: str = settings.kv_dtype
    if dtype == "auto":
        in_int8 = settings.encoder.dtype == settings.decoder.dtype == "int8"
        dtype = "float8" if in_int8 else _encoder_dtype(settings, device)
    dtype = FLOAT8 if dtype == "float8" else dtype
    return kv_layout(checkpoint, settings.page_frames, dtype, device)


def served_layout(checkpoint: Checkpoint, settings: Settings, device: str) -> PageLayout:
    if settings.handoff == "cross_kv":
        return served_kv_layout(checkpoint, settings, device)
    return states_layout(checkpoint, _encoder_dtype(settings, device))


def _encoder_dtype(settings: Settings, device: str) -> str:
    from cluster.common.model.device import resolve_dtype

    return resolve_dtype(settings.encoder.dtype, device)


def states_layout(checkpoint: Checkpoint, dtype: str = "float32") -> PageLayout:
    dims = checkpoint.dims
    return PageLayout.of_states(checkpoint.fingerprint, dims.n_audio_state, dims.n_audio_ctx, dtype)


def kv_layout(
    checkpoint: Checkpoint, page_frames: int = 0, dtype: str = "float32", device: str = "cpu"
) -> PageLayout:
    """Layout of one window's cross-attention KV.

    page_frames: 0 is the whole window on a CPU, so that attention reads a view without a gather,
    and `GPU_PAGE_FRAMES` on a GPU. dtype: resolved (not "auto"), the same for both roles.

    Raises ConfigurationError if the page does not divide the window.
    """
    dims = checkpoint.dims
    if page_frames == 0:
        divides = dims.n_audio_ctx % GPU_PAGE_FRAMES == 0
        page_frames = GPU_PAGE_FRAMES if device != "cpu" and divides else dims.n_audio_ctx
    if not 1 <= page_frames <= dims.n_audio_ctx or dims.n_audio_ctx % page_frames:
        raise ConfigurationError(
            f"page_frames {page_frames} does not divide a window of {dims.n_audio_ctx} frames"
        )
    return PageLayout(
        model=checkpoint.fingerprint,
        n_layer=dims.n_text_layer,
        n_head=dims.n_text_head,
        head_dim=dims.text_head_dim,
        n_frames=dims.n_audio_ctx,
        page_frames=page_frames,
        dtype=dtype,
    )


def available_transport() -> Literal["nixl", "memory"]:
    try:
        load_api()
    except ConfigurationError:
        return "memory"
    return "nixl"


def make_wire(config: TransferConfig) -> Wire:
    """A wire, not open yet; ConfigurationError if the GPU's allocator does not suit it."""
    chosen = available_transport() if config.transport == "auto" else config.transport
    if chosen == "memory":
        from cluster.common.kv.memory_wire import MemoryWire

        return MemoryWire(config)
    from cluster.common.kv.nixl_wire import NixlWire

    return NixlWire(config)


def make_exporter(checkpoint: Checkpoint, settings: Settings, device: str, name: str) -> KVExporter:
    """`name` is role and replica, as in "encoder-0". Raises ConfigurationError."""
    from cluster.common.kv.exporter import KVExporter

    config, layout = _config(settings, device, name), served_layout(checkpoint, settings, device)
    n_pages = settings.encoder.export_windows * layout.pages_per_window
    return KVExporter(layout, n_pages, config, make_wire(config))


def make_importer(checkpoint: Checkpoint, settings: Settings, device: str, name: str) -> KVImporter:
    """As `make_exporter`."""
    from cluster.common.kv.importer import KVImporter

    config, layout = _config(settings, device, name), served_layout(checkpoint, settings, device)
    n_windows = settings.decoder.kv_windows
    if layout.payload == "encoder_states":
        n_windows = min(n_windows, LANDING_WINDOWS)
    return KVImporter(layout, n_windows * layout.pages_per_window, config, make_wire(config))


def make_kv_pool(checkpoint: Checkpoint, settings: Settings, device: str) -> PagePool | None:
    """The pool into which a decoder projects states; None where it reads KV."""
    from cluster.common.kv.pool import PagePool

    if settings.handoff == "cross_kv":
        return None
    layout = served_kv_layout(checkpoint, settings, device)
    return PagePool(layout, settings.decoder.kv_windows * layout.pages_per_window, device)


def _config(settings: Settings, device: str, name: str) -> TransferConfig:
    return TransferConfig(
        cluster_key=(settings.cluster_key or "").encode(),
        name=name,
        transport=settings.transport,
        device=device,
        fetch_timeout_s=settings.decoder.fetch_timeout_s,
    )
