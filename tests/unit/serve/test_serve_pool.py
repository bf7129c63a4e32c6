"""A router's client of a pool, over a handle that the test plays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.messages import EncodeRequest, WorkerStatus
from cluster.serve.hooks.ledger import LARGE_POOLS
from cluster.serve.serve_pool import N_ASKED, ServePool
from cluster.serve.worker_choice import WorkLedger, key_of

REQUEST = EncodeRequest("clients", 0, 1, np.zeros(16, np.int16), 30.0)


class Handle:
    """Serve's handle of workers that never answer."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, request: EncodeRequest) -> asyncio.Future[Any]:
        self.called.set()
        return asyncio.get_running_loop().create_future()


async def test_a_cancelled_call_counts_nowhere_though_serve_chooses_a_worker_later() -> None:
    """Serve chooses in a thread of its own, which hears of the cancellation last."""
    ledger, handle = WorkLedger(), Handle()
    call = asyncio.create_task(ServePool(handle, "encoder", ledger).encode(REQUEST))
    await handle.called.wait()
    ledger.send("a", key_of(REQUEST), 1.0)
    assert ledger.work("a") == 1.0
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ledger.work("a") == 0.0
    ledger.send("a", key_of(REQUEST), 1.0)
    assert ledger.work("a") == 0.0


class LargePool(Handle):
    """Serve's handle of 1000 workers, of which every tenth does not answer."""

    deployment_id = "large"

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.asked, self.broken = 0, broken

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked += 1
        if self.broken or self.asked % 10 == 0:
            answer.set_exception(RuntimeError("it died"))
        else:
            answer.set_result(replace(STATUS, replica=f"encoder-{self.asked % 7}"))
        return answer


STATUS = WorkerStatus("encoder-0", "encoder", True, "m", "memory", "cpu", 1, 1, 0, 0)


async def test_of_a_large_pool_some_say_how_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every router is asked for its health every few seconds, and would ask every worker."""
    monkeypatch.setitem(LARGE_POOLS, "large", 1000)
    handle = LargePool()
    found = await ServePool(handle, "encoder", WorkLedger()).status()
    assert handle.asked == N_ASKED
    assert sorted(one.replica for one in found) == [f"encoder-{n}" for n in range(7)]
    assert {one.of_workers for one in found} == {1000}
    assert await ServePool(LargePool(broken=True), "encoder", WorkLedger()).status() == []
