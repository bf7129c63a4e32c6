"""The section of `benchmark.gpu` that tells what each setting gives: 8 bits, contexts, page sizes.

Each row is a pair of engines with one setting other than as served: windows encoded per second,
the time of a decode step, and requests per second. Of the first model alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.gpu.decode import fill_pool, step_s
from benchmark.gpu.rig import Clock, Pair, Record, Rig, Served, clip
from benchmark.gpu.serving import closed_loop, latencies
from cluster.common.errors import ConfigurationError
from cluster.common.messages import FRAMES_PER_S
from cluster.common.model.encoder_context import EncoderContext

TRIMMED = "trimmed contexts"
OPTIONS: dict[str, dict[str, Any]] = {
    "as served": {},
    "encoder in 8 bits": {"encoder": {"dtype": "float8"}},
    "KV in 8 bits": {"kv_dtype": "float8"},
    "encoder and KV in 8 bits": {"encoder": {"dtype": "float8"}, "kv_dtype": "float8"},
    TRIMMED: {"encoder": {"context": "trimmed"}},
    "a page for each window": {"page_frames": 1500},
}


def options(rig: Rig, clock: Clock, record: Record) -> None:
    """Each option beside what is served; one that this device cannot is told."""
    sizes = rig.sizes
    name, workload, n = next(iter(sizes.models)), sizes.workloads[0], min(32, max(sizes.in_flight))
    pcm = [clip(workload.audio_s, i) for i in range(n)]
    for what, chosen in OPTIONS.items():
        clock.check(3 * sizes.point_s)
        n_audio_ctx = rig.checkpoint(name).dims.n_audio_ctx
        frames = round(workload.audio_s * FRAMES_PER_S)
        context = EncoderContext().positions_for(frames, n_audio_ctx) if what == TRIMMED else 0
        try:
            with rig.pair(name, max_batch=n, windows=2 * n, **chosen) as pair:
                row = _measured(rig, pair, pcm, workload.n_tokens, context)
                record(f"{name}, {what}, {workload.name}, {n} in flight", row)
        except ConfigurationError as error:
            record(f"{name}, {what}", str(error))


def _measured(
    rig: Rig, pair: Pair, pcm: list[NDArray[np.int16]], n_tokens: int, context: int
) -> dict[str, float]:
    n, seconds = len(pcm), rig.sizes.point_s
    row = {"windows_per_s": round(asyncio.run(_encode_rate(pair, pcm, context, seconds)), 2)}
    turns = itertools.count()

    async def one() -> Served:
        return await pair.transcribe(pcm[next(turns) % n], n_tokens, context)

    served, rate = asyncio.run(closed_loop(one, n, seconds))
    row |= {"requests_per_s": round(rate, 2)} | latencies(served)
    if not context:  # steps are timed over windows of all positions
        fill_pool(pair)
        row["step_ms"] = round(1000 * step_s(pair, n), 3)
    return row


async def _encode_rate(
    pair: Pair, pcm: list[NDArray[np.int16]], context: int, seconds: float
) -> float:
    """Windows per second, all of `pcm` at once and again; the first time is not counted."""
    n_encoded, begun = -len(pcm), 0.0
    while n_encoded <= 0 or time.perf_counter() < begun + seconds:
        for handle in await asyncio.gather(*(pair.encode(one, context) for one in pcm)):
            pair.exporter.revoke(handle.lease)
        n_encoded += len(pcm)
        begun = begun or time.perf_counter()
    return n_encoded / (time.perf_counter() - begun)
