"""What it costs to ask a worker for its load: a real Ray on this machine, and one actor.

The call is the one that a router of a large pool makes. Both ends share the cores of this machine
with the rest of Ray, so processor time counts and not the time by the clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import psutil

from benchmark.serving.scale.figures import Figure
from cluster.messages import WorkerLoad
from cluster.serve.ray_internals import routing_stats_of

ROUNDS = 1_500
TOGETHER = (1, 4, 16)


class Worker:
    """A replica's end of the question."""

    async def record_routing_stats(self) -> dict[str, float]:
        return WorkerLoad(3.0, 16.0, 0.1).as_stats()

    async def pid(self) -> int:
        import os

        return os.getpid()


def measure() -> list[Figure]:
    import ray

    ray.init(
        address="local", num_cpus=1, logging_level=logging.ERROR, log_to_driver=False,
        include_dashboard=False,
    )  # fmt: skip
    try:
        actor: Any = ray.remote(Worker).options(num_cpus=0).remote()
        worker = psutil.Process(ray.get(actor.pid.remote()))
        replica = SimpleNamespace(_actor_handle=actor)
        return asyncio.run(_ask(replica, worker))
    finally:
        ray.shutdown()


async def _ask(replica: Any, worker: psutil.Process) -> list[Figure]:
    figures, here = [], psutil.Process()
    await asyncio.gather(*(routing_stats_of(replica) for _ in range(200)))
    for together in TOGETHER:
        before, waits = (_cpu_s(here), _cpu_s(worker)), []
        for _ in range(ROUNDS // together):
            began = time.perf_counter()
            await asyncio.gather(*(routing_stats_of(replica) for _ in range(together)))
            waits.append(time.perf_counter() - began)
        asked = together * (ROUNDS // together)
        own, theirs = (1000 * (_cpu_s(one) - was) / asked for one, was in
                       zip((here, worker), before, strict=True))  # fmt: skip
        waits.sort()
        figures += [
            Figure("a question: router's processor time", together, "ms", None, own),
            Figure("a question: worker's processor time", together, "ms", None, theirs),
            Figure(
                "so many questions at once: p50", together, "ms", None, 1e3 * waits[len(waits) // 2]
            ),
            Figure(
                "so many questions at once: p95",
                together,
                "ms",
                None,
                1e3 * waits[len(waits) * 95 // 100],
            ),
        ]
    return sorted(figures, key=lambda figure: figure.what)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
