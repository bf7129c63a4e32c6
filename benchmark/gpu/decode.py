"""The decoder's section of `benchmark.gpu`: the time of a step, through the engine."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmark.gpu.rig import PATIENCE_S, Clock, Pair, Record, Rig, greedy
from cluster.common.messages import DecodeRequest

STEADY_TOKENS = 200  # of a decode whose steps are timed


def decoder(rig: Rig, clock: Clock, record: Record) -> None:
    """Time of a decode step by batch, through the engine, against the bytes that it reads."""
    for name in rig.sizes.models:
        largest = max(rig.sizes.decode_batches)
        with rig.pair(name, max_batch=largest, windows=largest, encode_batch=1) as pair:
            record(f"{name}: load, compile and capture, s", pair.prepare_s)
            fill_pool(pair)
            for batch in rig.sizes.decode_batches:
                clock.check()
                seconds = step_s(pair, batch)
                limit = rig.gpu.step_s(rig.shape(name), STEADY_TOKENS, batch)
                record(f"{name}, batch of {batch}: step, ms", 1000 * seconds)
                record(f"{name}, batch of {batch}: roofline, ms", 1000 * limit)
                record(f"{name}, batch of {batch}: tokens/s", batch / seconds)
            batch = min(8, largest)
            kernels = rig.profiled(lambda batch=batch: step_s(pair, batch))
            record(f"{name}: kernels of {STEADY_TOKENS} steps, batch of {batch}", kernels)


def step_s(pair: Pair, batch: int) -> float:
    """Seconds of a step while exactly `batch` sequences run: wall time, the host's share too."""
    futures = [submit(pair, handle, STEADY_TOKENS) for handle in publish(pair, batch)]
    first: tuple[float, int] | None = None
    last = first
    while not any(future.done() for future in futures):
        stats = pair.decoder.stats()
        if stats.running == batch:
            last = time.perf_counter(), stats.steps
            first = first or last
        time.sleep(0.0005)
    for future in futures:
        future.result(PATIENCE_S)
    if first is None or last is None or last[1] <= first[1]:
        raise RuntimeError(f"a batch of {batch} was never seen running")
    return (last[0] - first[0]) / (last[1] - first[1])


def fill_pool(pair: Pair) -> None:
    """Random KV in every exported page, the same each time."""
    device = pair.exporter.pool.device
    generator = torch.Generator(device).manual_seed(0)
    for page in pair.exporter.pool.tensor:
        page.copy_(torch.randn(page.shape, device=device, generator=generator))
    if pair.exporter.pool.device.type == "cuda":
        torch.cuda.synchronize()


def publish(pair: Pair, n: int) -> list[Any]:
    """Handles of so many windows, of whatever is in the pool."""
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
