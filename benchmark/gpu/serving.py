"""Sections of `benchmark.gpu` at the level of requests, through both engines and without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.gpu.decode import fill_pool, step_s
from benchmark.gpu.rig import Pair, Record, Rig, Served, Workload, clip
from benchmark.shared.loadgen import SystemUnderTest, figures
from cluster.common.errors import ConfigurationError

WARM_UP_SHARE = 0.25  # of a load point's time, before it
LOADGEN_S = 30.0  # of a scenario: MLPerf wants ten minutes
# MLPerf submissions, with weights and settings of their own.
OTHERS = {"TensorRT-LLM, H200, Offline: windows/s": 67.9, "vLLM, H200, Offline: windows/s": 60.7}
OPTIONS: dict[str, dict[str, Any]] = {
    "as served": {},
    "KV in 8 bits": {"kv_dtype": "float8"},
}


class _Requests:
    def __init__(self, pair: Pair, workload: Workload) -> None:
        self._pair, self._workload = pair, workload
        self._n = 0

    async def __call__(self) -> Served:
        self._n += 1
        pcm = clip(self._workload.audio_s, self._n)
        return await self._pair.transcribe(pcm, self._workload.n_tokens)


async def closed_loop(
    one: Callable[[], Awaitable[Served]], n: int, seconds: float
) -> tuple[list[Served], float]:
    """Keep `n` requests in flight after a warm-up. Return what ended in `seconds`, and its rate."""
    begun = time.perf_counter() + WARM_UP_SHARE * seconds
    end = begun + seconds
    served: list[Served] = []

    async def client() -> None:
        while time.perf_counter() < end or not served:
            served.append(await one())

    await asyncio.gather(*(client() for _ in range(n)))
    within = [request for request in served if begun <= request.ended_s <= end]
    if within:
        return within, len(within) / seconds
    last = served[-1]  # only where a request takes longer than `seconds`, as in a smoke run
    return [last], n / (last.ended_s - last.begun_s)


def latencies(served: list[Served]) -> dict[str, float]:
    whole_ms = [1000 * (request.ended_s - request.begun_s) for request in served]
    row: dict[str, float] = {"requests": len(served)}
    for percent in (50, 95, 99):
        row[f"e2e_p{percent}_ms"] = round(float(np.percentile(whole_ms, percent)), 2)
    return row


def e2e(rig: Rig, record: Record) -> None:
    """Measure requests per second and latencies in a closed loop, for each workload."""
    sizes = rig.sizes
    for name in sizes.models:
        with rig.pair(name, max_batch=max(sizes.in_flight)) as pair:
            for workload in sizes.workloads:
                one = _Requests(pair, workload)
                for n in sizes.in_flight:
                    served, rate = asyncio.run(closed_loop(one, n, sizes.point_s))
                    limit = rig.gpu.windows_per_s(rig.shape(name), workload.n_tokens + 2, n)
                    row = {"requests_per_s": round(rate, 2), "predicted": round(limit, 1)}
                    row["rtfx"] = round(rate * workload.audio_s, 1)
                    record(f"{name}, {workload.name}, {n} in flight", row | latencies(served))


def mlperf(rig: Rig, record: Record) -> None:
    """Measure MLPerf's load on the first model, without HTTP, by LoadGen if it is installed."""
    for what, rate in OTHERS.items():
        record(what, rate)
    name, workload, n = (
        next(iter(rig.sizes.models)),
        rig.sizes.workloads[-1],
        max(rig.sizes.in_flight),
    )
    with rig.pair(name, max_batch=n) as pair:
        one = _Requests(pair, workload)
        served, rate = asyncio.run(closed_loop(one, n, rig.sizes.point_s))
        record(
            f"{workload.name}, {n} in flight", {"windows_per_s": round(rate, 2)} | latencies(served)
        )
        try:
            import mlperf_loadgen as loadgen
        except ImportError:
            record("LoadGen", "not installed: pip install mlcommons-loadgen")
            return

        async def send() -> str:
            await one()
            return "answered"

        under_test = SystemUnderTest(loadgen, send, n)
        seconds = LOADGEN_S if rig.sizes.repeats > 1 else 1.0
        for scenario, found in under_test.scenarios(rate, seconds).items():
            per_s, p99_s, says = figures(found)
            row = {"windows_per_s": round(per_s, 2), "p99_s": round(p99_s, 2), "loadgen": says}
            record(scenario, row)
        under_test.close()


def hugging_face(rig: Rig, record: Record) -> None:
    """Measure `generate` with a static cache, compiled, on the same weights and lengths."""
    from transformers import WhisperForConditionalGeneration, logging

    logging.set_verbosity_error()
    dtype = torch.bfloat16 if rig.device == "cuda" else torch.float32
    for name in reversed(rig.sizes.models):  # the smaller one first: compiling takes a minute
        path = rig.checkpoint(name).path
        model: Any = WhisperForConditionalGeneration.from_pretrained(path, dtype=dtype)
        model = model.to(rig.device).eval()
        if rig.device == "cuda":
            model.generation_config.cache_implementation = "static"
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        for workload in rig.sizes.workloads:
            for batch in rig.sizes.rival_batches:
                seconds = _generate_s(rig, model, workload.n_tokens, batch)
                record(
                    f"{name}, {workload.name}, batch of {batch}",
                    {"requests_per_s": round(batch / seconds, 2), "batch_ms": 1000 * seconds},
                )
        del model
        if rig.device == "cuda":
            torch.cuda.empty_cache()


def _generate_s(rig: Rig, model: Any, n_tokens: int, batch: int) -> float:
    """Return the seconds of a batch, from features on the device to tokens, after a warm-up."""
    shape = (batch, model.config.num_mel_bins, 3000)
    features = torch.randn(shape, device=rig.device).to(model.dtype)

    def run() -> None:
        tokens = model.generate(
            features,
            language="en",
            task="transcribe",
            return_timestamps=False,
            do_sample=False,
            min_new_tokens=n_tokens,
            max_new_tokens=n_tokens,
        )
        assert tokens.shape[1] >= n_tokens, tokens.shape

    run()
    return rig.time_s(run, 1)


def options(rig: Rig, record: Record) -> None:
    """Measure each option alone on the first model, under MLPerf's load."""
    sizes = rig.sizes
    name, workload, n = next(iter(sizes.models)), sizes.workloads[-1], max(sizes.in_flight)
    pcm = [clip(workload.audio_s, i) for i in range(n)]
    for what, chosen in OPTIONS.items():
        try:
            with rig.pair(name, max_batch=n, windows=2 * n, **chosen) as pair:
                rate = asyncio.run(_encode_rate(pair, pcm, sizes.point_s))
                one = _Requests(pair, workload)
                served, per_s = asyncio.run(closed_loop(one, n, sizes.point_s))
                fill_pool(pair)
                row = {"windows_per_s": round(rate, 2), "requests_per_s": round(per_s, 2)}
                row |= {"step_ms": round(1000 * step_s(pair, n), 3)} | latencies(served)
                record(f"{name}, {what}, {workload.name}, {n} in flight", row)
        except ConfigurationError as error:
            record(f"{name}, {what}", str(error))


async def _encode_rate(pair: Pair, pcm: list[NDArray[np.int16]], seconds: float) -> float:
    """Return windows per second with all of `pcm` in flight; the first round does not count."""
    n_encoded, begun = -len(pcm), 0.0
    while n_encoded <= 0 or time.perf_counter() < begun + seconds:
        for handle in await asyncio.gather(*(pair.encode(one) for one in pcm)):
            pair.exporter.revoke(handle.lease)
        n_encoded += len(pcm)
        begun = begun or time.perf_counter()
    return n_encoded / (time.perf_counter() - begun)
