"""An encoder's export pools, one for each payload, and the choice between them for each batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cluster.kv.exporter import KVExporter
from cluster.messages import CrossKVHandle, EncodeRequest
from cluster.model.checkpoint import Checkpoint
from encoder_worker.checks import check_layout
from encoder_worker.payload_choice import HandoffChoice

Pages = tuple[int, ...]


class Exports:
    """One exporter, or two of different payloads, which belong to the caller."""

    def __init__(self, checkpoint: Checkpoint, exporter: KVExporter, other: KVExporter | None):
        """Raises ConfigurationError where a layout is not the checkpoint's."""
        self._by_payload = {one.layout.payload: one for one in (exporter, other) if one is not None}
        self._choice: HandoffChoice | None = None
        for one in self:
            check_layout(checkpoint, one)

    def __iter__(self) -> Iterator[KVExporter]:
        return iter(self._by_payload.values())

    @property
    def has_kv(self) -> bool:
        return "cross_kv" in self._by_payload

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of the pool that K and V go to; None without one."""
        exporter = self._by_payload.get("cross_kv")
        return None if exporter is None else exporter.pool.tensor.dtype

    @property
    def wants_choice(self) -> bool:
        return len(self._by_payload) > 1

    def choose_by(self, projection_s: float) -> None:
        """From here on links are measured, and `next` goes by them; seconds for one window."""
        window_bytes = {
            payload: one.layout.pages_per_window * one.layout.page_bytes
            for payload, one in self._by_payload.items()
        }
        self._choice = HandoffChoice(window_bytes, projection_s)
        for exporter in self:
            exporter.on_read = self._choice.note

    def next(self) -> KVExporter:
        """The exporter to whose pool the next batch writes."""
        if self._choice is not None:
            return self._by_payload[self._choice.payload]
        return next(iter(self))

    def revoke(self, handle: CrossKVHandle) -> bool:
        """Free a window's pages; False when they are free already."""
        return self._by_payload[handle.payload].revoke(handle.lease)

    def publish_again(self, key: bytes, request: EncodeRequest) -> CrossKVHandle | None:
        """A further lease on what any pool has under `key`, that of the next batch first."""
        chosen = self.next()
        for one in (chosen, *(other for other in self if other is not chosen)):
            handle = one.publish_again(
                key,
                request_id=request.request_id,
                window=request.window,
                attempt=request.attempt,
            )
            if handle is not None:
                return handle
        return None

    def healthy(self) -> str | None:
        """None when well, else why not."""
        return next((reason for one in self if (reason := one.healthy()) is not None), None)

    @property
    def n_leases(self) -> int:
        return sum(one.active_leases() for one in self)

    @property
    def n_read(self) -> float:
        """Windows of all positions whose pages are under leases, however many leases they have."""
        return sum(one.published.n_read_pages / one.layout.pages_per_window for one in self)

    @property
    def n_free_pages(self) -> int:
        """Pages that the next windows can have; kept ones that nobody reads are among them."""
        return sum(one.n_free_pages for one in self)

    @property
    def n_pages(self) -> int:
        return sum(one.pool.n_pages for one in self)

    @property
    def n_windows(self) -> int:
        """That all pools hold."""
        return sum(one.pool.n_pages // one.layout.pages_per_window for one in self)


def reserve(exporter: KVExporter, n_windows: int, wait_s: float) -> list[Pages]:
    """Pages for as many windows as there is room for, at most `n_windows`; waits for the first."""
    n_pages = exporter.layout.pages_per_window
    reserved: list[Pages] = []
    while len(reserved) < n_windows:
        pages = exporter.reserve(n_pages, 0.0 if reserved else wait_s)
        if pages is None:
            break
        reserved.append(pages)
    return reserved


def give_back_surplus(exporter: KVExporter, pages: Pages, n_frames: int) -> Pages:
    """Of a whole window's reserved pages those that `n_frames` take; the others are free again."""
    n_pages = exporter.layout.pages_for(n_frames)
    if surplus := pages[n_pages:]:
        exporter.abandon(surplus)
    return pages[:n_pages]
