"""A router's client of a pool, over a handle that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from cluster.common.errors import (
    OverloadedError,
    PeerLostError,
    SequenceFailedError,
    WorkerDiedError,
    WorkerGoneError,
)
from cluster.common.messages import EncodeRequest, WorkerStatus
from cluster.serve.own_calls import OwnCalls, key_of
from cluster.serve.serve_pool import N_ASKED, ServePool

REQUEST = EncodeRequest("clients", 0, 1, np.zeros(16, np.int16), 30.0)


class Handle:
    def __init__(self, error: Exception | None = None) -> None:
        self.called, self.error = asyncio.Event(), error
        self.on_call: Callable[[], None] = lambda: None

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, request: EncodeRequest) -> asyncio.Future[Any]:
        self.called.set()
        self.on_call()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            answer.set_exception(self.error)
        return answer


async def test_a_cancelled_call_counts_nowhere_though_serve_chooses_a_worker_later() -> None:
    calls, handle = OwnCalls(), Handle()
    call = asyncio.create_task(ServePool(handle, "encoder", calls).encode(REQUEST))
    await handle.called.wait()
    calls.send("a", key_of(REQUEST), 1.0)
    assert calls.load("a").work == 1.0
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert calls.load("a").work == 0.0
    calls.send("a", key_of(REQUEST), 1.0)
    assert calls.load("a").work == 0.0


@pytest.mark.parametrize(
    ("error", "is_worker_s_fault"),
    [
        (SequenceFailedError("it is not a number"), True),
        (WorkerGoneError("it died"), True),
        (PeerLostError("the encoder died"), False),
        (OverloadedError("full"), None),
    ],
)
async def test_how_a_call_fails_is_noted_of_its_worker(
    error: Exception, is_worker_s_fault: bool | None
) -> None:
    calls, handle = OwnCalls(), Handle(error)
    key = key_of(REQUEST)
    handle.on_call = lambda: calls.send("a", key, 1.0)
    with pytest.raises(type(error)):
        await ServePool(handle, "encoder", calls).encode(REQUEST)
    assert (calls.trouble("a") > 0.0) is bool(is_worker_s_fault)
    assert calls.failed_at(key) == (set() if is_worker_s_fault is None else {"a"})
    assert calls.load("a").work == 0.0


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (ActorDiedError(), WorkerDiedError),
        (RayActorError(), WorkerDiedError),
        (ActorUnavailableError("it is slow", None), WorkerGoneError),
    ],
)
async def test_a_worker_that_died_is_told_from_one_out_of_reach(
    error: Exception, ours: type[Exception]
) -> None:
    with pytest.raises(WorkerGoneError) as failure:
        await ServePool(Handle(error), "encoder", OwnCalls()).encode(REQUEST)
    assert type(failure.value) is ours


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


async def test_of_a_large_pool_some_say_how_they_are() -> None:
    calls = OwnCalls()
    calls.sizes["large"] = 1000
    handle = LargePool()
    found = await ServePool(handle, "encoder", calls).status()
    assert handle.asked == N_ASKED
    assert sorted(one.replica for one in found) == [f"encoder-{n}" for n in range(7)]
    assert {one.of_workers for one in found} == {1000}
    assert await ServePool(LargePool(broken=True), "encoder", calls).status() == []
