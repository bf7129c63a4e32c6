"""What a worker exports and imports, as `settings.handoff` wants it.

An encoder has an exporter for each payload that it may publish. A decoder takes both payloads
whatever the setting is: where nobody said that states may come, their landing pool is opened by the
first that does. Each payload has a pool, an agent and a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from cluster.errors import LayoutMismatchError
from cluster.kv.exporter import KVExporter
from cluster.kv.importer import KVImporter
from cluster.kv.layout import PageLayout
from cluster.kv.layout_for import exported_layouts, served_kv_layout, served_states_layout
from cluster.kv.pool import PagePool
from cluster.kv.transfer_config import FetchStats, TransferConfig
from cluster.kv.wires.connect import make_wire
from cluster.messages import CrossKVHandle
from cluster.model.checkpoint import Checkpoint
from cluster.settings import Settings

logger = logging.getLogger(__name__)

LANDING_WINDOWS = 32  # states in flight at most; they land in milliseconds and leave at once


class HandoffImporter:
    """What a decoder imports by: a KVImporter of KV, and one of states once those may come.

    It has the methods of `KVImporter`, which go to the importer of the handle's payload. `layout`
    and `pool` are those of the KV; `pool_for` tells which pages `fetch` takes.
    """

    def __init__(self, kv: KVImporter, make_landing: Callable[[], KVImporter]) -> None:
        """Takes over `kv`, and the importer of states that `make_landing` makes: closes them."""
        self.layout = kv.layout
        self.pool = kv.pool
        self._kv = kv
        self._make_landing = make_landing
        self._lock = threading.Lock()  # for opening and closing the landing pool
        self._importers = [kv]  # and that of the states, once it is open
        self._closed = False

    def open_landing(self) -> None:
        """Make the importer of states, unless it is there already or this one is closed."""
        with self._lock:
            if self._landing is None and not self._closed:
                self._importers.append(self._make_landing())

    @property
    def landing_pool(self) -> PagePool | None:
        """Where states land; None as long as none came and none were expected."""
        return None if self._landing is None else self._landing.pool

    @property
    def transport(self) -> str:
        """What moved the bytes of the payload that came; the KV's until then."""
        return max((one.transport for one in self._importers), key=len)  # nixl/cma, not nixl

    @property
    def projection_s(self) -> float:
        return self._kv.projection_s

    @projection_s.setter
    def projection_s(self, seconds: float) -> None:
        for importer in self._importers:
            importer.projection_s = seconds

    def pool_for(self, handle: CrossKVHandle) -> PagePool:
        """The pool whose pages `fetch` takes for this handle, once it was accepted."""
        return self._importer_of(handle).pool

    def accept(self, handle: CrossKVHandle) -> None:
        if _has_states(handle) and self._landing is None:
            self._kv.check_signature(handle)  # nothing is opened for a stranger
            logger.info("the first encoder states came: opening a landing pool")
            self.open_landing()
        self._importer_of(handle).accept(handle)

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        return self._importer_of(handle).fetch(handle, pages)

    def drop(self, handle: CrossKVHandle) -> None:
        self._importer_of(handle).drop(handle)

    def refused(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for importer in self._importers:
            total.update(importer.refused())
        return total

    def healthy(self) -> str | None:
        reasons = (importer.healthy() for importer in self._importers)
        return next((reason for reason in reasons if reason is not None), None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for importer in self._importers:
            importer.close()

    @property
    def _landing(self) -> KVImporter | None:
        return self._importers[1] if len(self._importers) > 1 else None

    def _importer_of(self, handle: CrossKVHandle) -> KVImporter:
        """The KV's for anything but states: it refuses what is no handle."""
        if not _has_states(handle):
            return self._kv
        if self._landing is None:
            raise LayoutMismatchError("no encoder states are taken here any more")
        return self._landing


def _has_states(handle: CrossKVHandle) -> bool:
    """Also for what is no handle, since nothing was verified yet."""
    return getattr(handle, "payload", None) == "encoder_states"


def make_exporters(
    checkpoint: Checkpoint, settings: Settings, device: str, name: str
) -> tuple[KVExporter, ...]:
    """An exporter for each payload that the encoder may publish; it begins with the first.

    name: role and replica, as in "encoder-0".

    Raises:
        ConfigurationError: the transport does not work here, or the pages do not fit.
    """
    config = _config(settings, device, name)
    with ExitStack() as made:  # one that cannot be made closes those before it
        exporters = []
        for layout in exported_layouts(checkpoint, settings, device):
            n_pages = settings.encoder.export_windows * layout.pages_per_window
            exporters.append(KVExporter(layout, n_pages, config, make_wire(config)))
            made.callback(exporters[-1].close)
        made.pop_all()
    return tuple(exporters)


def make_handoff_importer(
    checkpoint: Checkpoint, settings: Settings, device: str, name: str
) -> HandoffImporter:
    """The importer of a decoder; `name` is role and replica, as in "decoder-0".

    Raises:
        ConfigurationError: the transport does not work here, or the pages do not fit.
    """
    config = _config(settings, device, name)
    kv_windows = settings.decoder.kv_windows

    def make(layout: PageLayout, n_windows: int) -> KVImporter:
        return KVImporter(layout, n_windows * layout.pages_per_window, config, make_wire(config))

    states = served_states_layout(checkpoint, settings, device)
    importer = HandoffImporter(
        make(served_kv_layout(checkpoint, settings, device), kv_windows),
        lambda: make(states, min(kv_windows, LANDING_WINDOWS)),
    )
    if settings.handoff != "cross_kv":
        with ExitStack() as made:
            made.callback(importer.close)
            importer.open_landing()
            made.pop_all()
    return importer


def _config(settings: Settings, device: str, name: str) -> TransferConfig:
    return TransferConfig(
        cluster_key=(settings.cluster_key or "").encode(),
        name=name,
        transport=settings.transport,
        device=device,
        fetch_timeout_s=settings.decoder.fetch_timeout_s,
    )
