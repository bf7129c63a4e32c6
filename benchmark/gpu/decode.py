"""Sections of `benchmark.gpu` for one engine: a decode step, and windows encoded per second."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from benchmark.gpu.rig import PAGE_FRAMES, PATIENCE_S, Pair, Record, Rig, clip, greedy
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.layout import PageLayout
from cluster.common.messages import DecodeRequest
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.weights import TORCH_DTYPES
from encoder_worker.forward import WindowEncoder

STEADY_TOKENS = 200  # of a decode whose steps are timed
LOOK_S = 0.005  # between two looks at the counters, each of which takes the GIL from a step


def decoder(rig: Rig, record: Record) -> None:
    """Measure a decode step by batch size, through the engine, beside the prediction."""
    for name in rig.sizes.models:
        largest = max(rig.sizes.decode_batches)
        with rig.pair(name, max_batch=largest, windows=largest, encode_batch=1) as pair:
            record(f"{name}: load, compile and capture, s", pair.prepare_s)
            fill_pool(pair)
            for batch in rig.sizes.decode_batches:
                seconds = step_s(pair, batch)
                limit = rig.gpu.step_s(rig.shape(name), STEADY_TOKENS, batch)
                record(f"{name}, batch of {batch}: step, ms", 1000 * seconds)
                record(f"{name}, batch of {batch}: predicted, ms", 1000 * limit)
                record(f"{name}, batch of {batch}: tokens/s", batch / seconds)
            batch = min(8, largest)
            kernels = rig.profiled(partial(step_s, pair, batch))
            record(f"{name}: kernels of {STEADY_TOKENS} steps, batch of {batch}", kernels)


def step_s(pair: Pair, batch: int) -> float:
    """Return the wall time of a step in seconds while exactly `batch` sequences run."""
    futures = [submit(pair, handle, STEADY_TOKENS) for handle in publish(pair, batch)]
    first: tuple[float, int] | None = None
    last = first
    while not any(future.done() for future in futures):
        stats = pair.decoder.stats()
        if stats.running == batch:
            last = time.perf_counter(), stats.steps
            first = first or last
        time.sleep(LOOK_S)
    for future in futures:
        future.result(PATIENCE_S)
    if first is None or last is None or last[1] <= first[1]:
        raise RuntimeError(f"a batch of {batch} was never seen running")
    return (last[0] - first[0]) / (last[1] - first[1])


def fill_pool(pair: Pair) -> None:
    """Fill every exported page with random KV, the same each time."""
    device = pair.exporter.pool.device
    generator = torch.Generator(device).manual_seed(0)
    for page in pair.exporter.pool.tensor:
        page.copy_(torch.randn(page.shape, device=device, generator=generator))
    if pair.exporter.pool.device.type == "cuda":
        torch.cuda.synchronize()


def publish(pair: Pair, n: int) -> list[Any]:
    """Publish `n` windows of whatever the pool holds, and return their handles."""
    layout = pair.exporter.layout
    handles = []
    for window in range(n):
        pages = pair.exporter.reserve(layout.pages_per_window, PATIENCE_S)
        assert pages is not None, "the export pool stayed full"
        names = {"request_id": "r", "window": window, "attempt": 0}
        handles.append(pair.exporter.publish(pages, frames=layout.n_frames, **names))
    return handles


def submit(pair: Pair, handle: Any, n_tokens: int) -> Any:
    request = DecodeRequest("r", handle.window, 0, handle, greedy(n_tokens), PATIENCE_S)
    return pair.decoder.submit(request)


def encoder(rig: Rig, record: Record) -> None:
    """Measure windows per second by batch size, with KV and with states alone, and its kernels."""
    largest = max(rig.sizes.encode_batches)
    for name in rig.sizes.models:
        checkpoint = rig.checkpoint(name)
        parts = rig.gpu.encode_parts_s(rig.shape(name))
        limit = 1 / sum(parts.values())
        record(f"{name}: predicted, windows/s", limit)
        record(f"{name}: of a window, ms", {part: 1000 * s for part, s in parts.items()})
        ways: dict[str, PageLayout] = {
            "pages of 125": kv_layout(checkpoint, PAGE_FRAMES, rig.dtype),
            "states alone": states_layout(checkpoint, rig.dtype),
        }
        for way, layout in ways.items():
            served = _Encoder(rig, checkpoint, layout)
            for batch in rig.sizes.encode_batches:
                seconds = served.batch_s(batch, max(1, rig.sizes.encoded // batch))
                rate = batch / seconds
                record(f"{name}, {way}, batch of {batch}: windows/s", rate)
                record(f"{name}, {way}, batch of {batch}: share of predicted", rate / limit)
            kernels = rig.profiled(partial(served.launch, largest, waits=True))
            record(f"{name}, {way}: kernels of a batch of {largest}", kernels)
            del served


class _Encoder:
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
        wait = self._encode(self._windows[:batch], self._pool, pages)
        if waits:
            wait()

    def batch_s(self, batch: int, n_batches: int) -> float:
        """Return the seconds of a batch; on a GPU the next one is launched before it is done."""
        waits = self._rig.device == "cpu"
        return self._rig.time_s(lambda: self.launch(batch, waits=waits), n_batches)
