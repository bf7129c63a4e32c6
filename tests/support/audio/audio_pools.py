"""Running audio pools, and ways to catch a worker in the act."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

from cluster.common.settings import RouterSettings
from router.audio.pool import AudioPool
from router.audio.stream import AudioStream
from router.audio.worker_handle import AudioProcess
from router.interface import RequestContext
from tests.support.waiting import eventually

PATIENCE_S = 30.0
until = eventually


def request(client: bytes = b"", time_s: float = PATIENCE_S) -> RequestContext:
    return RequestContext("r", None, timeout_s=time_s, client=client)


@contextlib.asynccontextmanager
async def running(**changes: object) -> AsyncIterator[AudioPool]:
    settings = RouterSettings.model_validate({"audio_workers": 1} | changes)
    pool = AudioPool(settings)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def pids(pool: AudioPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def worker_of(pool: AudioPool, stream: AudioStream) -> AudioProcess:
    (worker,) = (w for w in pool._workers if stream.upload_id in w.streams)
    return worker


async def freeze_on(pool: AudioPool, stream: AudioStream) -> int:
    """Stop the worker while it is inside a step of `stream`; return its process id."""
    worker = worker_of(pool, stream)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if worker.slot.get() == stream.upload_id:
            os.kill(worker.process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.02)
            if worker.slot.get() == stream.upload_id:
                return worker.process.pid
            os.kill(worker.process.pid, signal.SIGCONT)
        await asyncio.sleep(0)
    raise AssertionError("the worker was never seen on this upload")
