"""Memory of a router for each request that waits for its window, beside a task that waits."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from benchmark.serving.scale.figures import Figure
from cluster.messages import DecodeOptions, DecodeRequest, EncodeReply, EncodeRequest
from cluster.metrics import ROUTER_METRICS, silent_recorder
from cluster.settings import RouterSettings
from router.interface import RequestContext
from router.pipeline import Pipeline, RequestRun, WindowAudio

COUNTS = (1_000, 10_000)
PCM_S = 5
PCM = np.zeros(16_000 * PCM_S, np.int16)  # shared: audio is the request's own, and counted apart


class Waiting:
    """Pools whose workers never answer."""

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def decode(self, request: DecodeRequest, on_token: Any = None) -> Any:
        raise AssertionError("nothing was encoded")

    async def status(self) -> list[Any]:
        return []


def measure() -> list[Figure]:
    return asyncio.run(_measure())


async def _measure() -> list[Figure]:
    pipeline = Pipeline(Waiting(), Waiting(), RouterSettings(), silent_recorder(ROUTER_METRICS))

    async def request(number: int) -> None:
        context = RequestContext.unlimited(f"req-{number}", 120.0)
        audio = WindowAudio.of_samples(0, PCM)
        await pipeline.decode(RequestRun(context), audio, DecodeOptions())

    async def bare(number: int) -> None:
        await asyncio.get_running_loop().create_future()

    figures = []
    for count in COUNTS:
        ceiling, ours = [await _bytes_each(count, make) for make in (bare, request)]
        figures.append(Figure("router memory of a waiting request", count, "B", ceiling, ours))
    figures.append(Figure(f"its audio, {PCM_S} s", 1, "B", None, float(PCM.nbytes)))
    return figures


async def _bytes_each(count: int, make: Callable[[int], Coroutine[Any, Any, None]]) -> float:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tasks = [asyncio.get_running_loop().create_task(make(number)) for number in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (after - before) / count
