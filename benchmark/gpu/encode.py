"""The encoder's section of `benchmark.gpu`: windows per second, by batch and way into the pages."""

from __future__ import annotations

import torch

from benchmark.gpu.rig import PAGE_FRAMES, Clock, Record, Rig, clip
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.layout import PageLayout
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.weights import TORCH_DTYPES
from encoder_worker.forward import WindowEncoder


def encoder(rig: Rig, clock: Clock, record: Record) -> None:
    """Windows per second by batch and by way into the pages; then where the time goes."""
    largest = max(rig.sizes.encode_batches)
    for name in rig.sizes.models:
        checkpoint = rig.checkpoint(name)
        limit = 1 / rig.gpu.encode_s(rig.shape(name))
        record(f"{name}: roofline, windows/s", limit)
        ways: dict[str, PageLayout] = {
            "pages of 125": kv_layout(checkpoint, PAGE_FRAMES, rig.dtype),
            "whole-window pages": kv_layout(checkpoint, 1500, rig.dtype),
            "states alone": states_layout(checkpoint, rig.dtype),
        }
        for way, layout in ways.items():
            clock.check()
            served = _Encoder(rig, checkpoint, layout)
            for batch in rig.sizes.encode_batches:
                seconds = served.batch_s(batch, max(1, rig.sizes.encoded // batch))
                rate = batch / seconds
                record(f"{name}, {way}, batch of {batch}: windows/s", rate)
                record(f"{name}, {way}, batch of {batch}: share of roofline", rate / limit)
            kernels = rig.profiled(lambda served=served: served.launch(largest, waits=True))
            record(f"{name}, {way}: kernels of a batch of {largest}", kernels)
            del served


class _Encoder:
    """One model's encoder as it is served, over a pool of its own."""

    def __init__(self, rig: Rig, checkpoint: Checkpoint, layout: PageLayout) -> None:
        self._rig, self._n_pages = rig, layout.pages_per_window
        largest = max(rig.sizes.encode_batches)
        shape = (largest * self._n_pages, *layout.page_shape)
        self._pool = torch.empty(shape, dtype=TORCH_DTYPES[rig.dtype], device=rig.device)
        self._encode = WindowEncoder(checkpoint, rig.dtype, rig.device, payload=layout.payload)
        self._encode.prepare(self._pool, largest)
        self._windows = [clip(30.0, i) for i in range(largest)]

    def launch(self, batch: int, *, waits: bool) -> None:
        n = self._n_pages
        pages = [list(range(i * n, (i + 1) * n)) for i in range(batch)]
        ready = self._encode(self._windows[:batch], self._pool, pages)
        if waits:
            ready.wait()

    def batch_s(self, batch: int, n_batches: int) -> float:
        """Seconds of a batch; on a GPU the next one is launched before it is done."""
        waits = self._rig.device == "cpu"
        return self._rig.time_s(lambda: self.launch(batch, waits=waits), n_batches)
