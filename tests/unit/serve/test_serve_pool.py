"""A router's client of a pool, over a handle that the test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cluster.messages import EncodeRequest
from cluster.serve.serve_pool import ServePool
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
