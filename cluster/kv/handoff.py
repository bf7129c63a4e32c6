"""Both payloads behind one importer, and the exporters and importers that `settings.handoff` wants.

Each payload has a pool, an agent and a thread of its own, so leases, generations, quarantine and
failures are those of `cluster.kv.importer` for either. A decoder takes both whatever its setting
is: where nobody said that states may come, their landing pool is opened by the first that does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from cluster.errors import HandleRefusedError, LayoutMismatchError
from cluster.kv.connect import make_exporter, make_importer
from cluster.kv.handles import verify
from cluster.kv.layout import PageLayout
from cluster.kv.layout_for import exported_layouts, served_kv_layout, served_states_layout
from cluster.kv.pool import PagePool
from cluster.kv.tally import Tally, summed
from cluster.kv.transfer import FetchStats, KVExporter, KVImporter
from cluster.messages import CrossKVHandle
from cluster.model.checkpoint import Checkpoint
from cluster.settings import Settings

logger = logging.getLogger(__name__)

LANDING_WINDOWS = 32  # states in flight at most; they land in milliseconds and leave at once


class HandoffImporter:
    """A KVImporter for handles of either payload. `layout` and `pool` are those of the KV."""

    def __init__(
        self,
        kv: KVImporter,
        open_landing: Callable[[], KVImporter],
        *,
        cluster_key: bytes,
        expects_states: bool,
    ) -> None:
        """Takes over `kv`, and the importer that `open_landing` makes: closes them.

        expects_states: open the landing pool now, instead of at the first handle of states.
        """
        self.layout = kv.layout
        self.pool = kv.pool
        self._kv = kv
        self._open_landing = open_landing
        self._cluster_key = cluster_key
        self._lock = threading.Lock()  # for opening and closing the landing
        self._landing: KVImporter | None = open_landing() if expects_states else None
        self._closed = False
        self._refused = Tally()  # before there was a landing

    @property
    def landing_pool(self) -> PagePool | None:
        """Where states land; None as long as none came."""
        return None if self._landing is None else self._landing.pool

    @property
    def transport(self) -> str:
        """What moved the bytes of the payload that came; the KV's until then."""
        names = [self._kv.transport, *(one.transport for one in self._opened())]
        return max(names, key=len)  # "nixl/cma" says more than "nixl"

    @property
    def projection_s(self) -> float:
        return self._kv.projection_s

    @projection_s.setter
    def projection_s(self, seconds: float) -> None:
        for importer in (self._kv, *self._opened()):
            importer.projection_s = seconds

    def pool_for(self, handle: CrossKVHandle) -> PagePool:
        return self._importer_of(handle).pool

    def accept(self, handle: CrossKVHandle) -> None:
        """See `KVImporter.accept`."""
        if getattr(handle, "payload", None) == "encoder_states" and self._landing is None:
            self._verify(handle)  # nothing is opened for a stranger
            self._open()
        self._importer_of(handle).accept(handle)

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        """See `KVImporter.fetch`; `pages` are of `pool_for(handle)`."""
        return self._importer_of(handle).fetch(handle, pages)

    def drop(self, handle: CrossKVHandle) -> None:
        self._importer_of(handle).drop(handle)

    def refused(self) -> Mapping[str, int]:
        """Of both payloads."""
        counts = self._refused.counts()
        for importer in (self._kv, *self._opened()):
            counts = summed(counts, importer.refused())
        return counts

    def healthy(self) -> str | None:
        reasons = (importer.healthy() for importer in (self._kv, *self._opened()))
        return next((reason for reason in reasons if reason is not None), None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for importer in (*self._opened(), self._kv):
            importer.close()

    def _verify(self, handle: CrossKVHandle) -> None:
        try:
            verify(handle, self._cluster_key)
        except HandleRefusedError:
            self._refused.add("signature")
            raise

    def _open(self) -> None:
        with self._lock:
            if self._landing is None and not self._closed:
                logger.info("the first encoder states came: opening a landing pool")
                self._landing = self._open_landing()

    def _opened(self) -> tuple[KVImporter, ...]:
        return () if self._landing is None else (self._landing,)

    def _importer_of(self, handle: CrossKVHandle) -> KVImporter:
        """The KV's for anything but states: it refuses what is no handle."""
        if getattr(handle, "payload", None) != "encoder_states":
            return self._kv
        if self._landing is None:
            raise LayoutMismatchError("no encoder states are taken here any more")
        return self._landing


def make_exporters(
    checkpoint: Checkpoint, settings: Settings, device: str, *, cluster_key: bytes, name: str
) -> tuple[KVExporter, ...]:
    """An exporter for each payload that the encoder may publish; it begins with the first.

    Raises:
        ConfigurationError: the transport does not work here, or the pages do not fit.
    """
    return tuple(
        make_exporter(
            settings.transport,
            layout,
            settings.encoder.export_windows * layout.pages_per_window,
            cluster_key=cluster_key,
            name=name,
            device=device,
        )
        for layout in exported_layouts(checkpoint, settings, device)
    )


def landing_windows(kv_windows: int) -> int:
    """What a decoder's landing pool holds."""
    return min(kv_windows, LANDING_WINDOWS)


def make_handoff_importer(
    checkpoint: Checkpoint, settings: Settings, device: str, *, cluster_key: bytes, name: str
) -> HandoffImporter:
    """The importer of a decoder.

    Raises:
        ConfigurationError: the transport does not work here, or the pages do not fit.
    """
    n_windows = settings.decoder.kv_windows

    def make(layout: PageLayout, n_windows: int) -> KVImporter:
        return make_importer(
            settings.transport,
            layout,
            n_windows * layout.pages_per_window,
            cluster_key=cluster_key,
            name=name,
            device=device,
            fetch_timeout_s=settings.decoder.fetch_timeout_s,
        )

    states = served_states_layout(checkpoint, settings, device)
    return HandoffImporter(
        make(served_kv_layout(checkpoint, settings, device), n_windows),
        lambda: make(states, landing_windows(n_windows)),
        cluster_key=cluster_key,
        expects_states=settings.handoff != "cross_kv",
    )
