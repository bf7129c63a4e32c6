"""Choosing a transport, and making a worker's end of it: the one place that names them all.

"auto" is NIXL where it loads (Linux), else the transport within one process. What a worker exports
or imports is `settings.handoff`: cross-attention KV, or encoder states, which a decoder projects
into a pool of its own. To ask which transport there is imports no wire, and so not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.errors import ConfigurationError
from cluster.kv.layout_for import served_kv_layout, served_layout
from cluster.kv.transfer_config import TransferConfig
from cluster.kv.wires.nixl_agent import load_api
from cluster.model.checkpoint import Checkpoint
from cluster.settings import Settings

if TYPE_CHECKING:
    from cluster.kv.exporter import KVExporter
    from cluster.kv.importer import KVImporter
    from cluster.kv.pool import PagePool
    from cluster.kv.wires.wire import Wire

LANDING_WINDOWS = 32  # states in flight at most; they land in milliseconds and leave at once


def available_transport() -> Literal["nixl", "memory"]:
    """The best transport that works on this machine."""
    try:
        load_api()
    except ConfigurationError:
        return "memory"
    return "nixl"


def make_wire(config: TransferConfig) -> Wire:
    """A wire of the configured transport, not open yet.

    Raises:
        ConfigurationError: the GPU's allocator does not suit the transport.
    """
    chosen = available_transport() if config.transport == "auto" else config.transport
    if chosen == "memory":
        from cluster.kv.wires.memory_wire import MemoryWire

        return MemoryWire(config)
    from cluster.kv.wires.nixl_wire import NixlWire

    return NixlWire(config)


def make_exporter(checkpoint: Checkpoint, settings: Settings, device: str, name: str) -> KVExporter:
    """The exporter of an encoder; `name` is role and replica, as in "encoder-0".

    Raises:
        ConfigurationError: the transport does not work here, or the pages do not fit.
    """
    from cluster.kv.exporter import KVExporter

    config, layout = _config(settings, device, name), served_layout(checkpoint, settings, device)
    n_pages = settings.encoder.export_windows * layout.pages_per_window
    return KVExporter(layout, n_pages, config, make_wire(config))


def make_importer(checkpoint: Checkpoint, settings: Settings, device: str, name: str) -> KVImporter:
    """The importer of a decoder, as `make_exporter`."""
    from cluster.kv.importer import KVImporter

    config, layout = _config(settings, device, name), served_layout(checkpoint, settings, device)
    n_windows = settings.decoder.kv_windows
    if layout.payload == "encoder_states":
        n_windows = min(n_windows, LANDING_WINDOWS)
    return KVImporter(layout, n_windows * layout.pages_per_window, config, make_wire(config))


def make_kv_pool(checkpoint: Checkpoint, settings: Settings, device: str) -> PagePool | None:
    """Where a decoder projects the states that its importer reads; None where it reads KV."""
    from cluster.kv.pool import PagePool

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
