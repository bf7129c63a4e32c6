"""What fails alone gets little, then nothing, and is replaced; what fails everywhere harms nobody.

On a virtual clock, with the real `Pipeline`, `ServePool`, `Members` and `OwnCalls` of a router.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import PeerLostError, SequenceFailedError, SplitscribeError, WorkerError
from cluster.common.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    WorkerLoad,
)
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.settings_sources import load_settings
from cluster.common.tracing import NO_TRACER
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.serve.own_calls import ASIDE_S, N_WRONG, OwnCalls
from cluster.serve.replicas.workers import PoolWorker
from cluster.serve.serve_pool import ServePool
from cluster.serve.worker_choice import Members
from router.interface import RequestContext
from router.pipeline import Pipeline, RequestRun, WindowAudio

USED = 0.4  # of what the workers that are well can do
ENCODE_S, DECODE_S = 0.05, 0.4
ROWS = 8  # windows that a decoder has at once; an encoder has one
FAILS_IN_S = 0.02
NEVER_S = 1e9
PATIENCE_S = 60.0
POISON = 7  # what the samples of a window are that every worker fails

Fault = Callable[[Hashable, Any], Exception | None]  # (worker, request) -> what to raise


class LostCallError(SplitscribeError):
    pass


class Workers:
    def __init__(self, role: str, count: int, calls: OwnCalls, fault: Fault) -> None:
        self.deployment_id, calls.sizes[role] = role, count
        self.names = [f"{role}-{n}" for n in range(count)]
        self.asked: Counter[Hashable] = Counter()
        self.told: list[tuple[Hashable, str]] = []  # worker, and who was said to be unwell
        self._calls, self._fault = calls, fault
        self._members = Members({name: name for name in self.names})
        self._chance = random.Random(len(role) + count)
        self._rows = 1 if role == "encoder" else ROWS
        self._free = {name: asyncio.Semaphore(self._rows) for name in self.names}
        self._there = Counter[Hashable]()

    def options(self, **options: Any) -> Workers:
        return self

    def remote(self, request: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._call(request))

    async def _call(self, request: Any) -> Any:
        worker: Any = self._members.choose(request, self._calls, self._chance)[0]
        self.asked[worker] += 1
        if request.unwell:
            self.told.append((worker, request.unwell))
        if (error := self._fault(worker, request)) is not None:
            await asyncio.sleep(NEVER_S if isinstance(error, LostCallError) else FAILS_IN_S)
            raise error
        self._there[worker] += 1
        async with self._free[worker]:
            await asyncio.sleep(ENCODE_S if self._rows == 1 else DECODE_S)
        self._there[worker] -= 1
        return self._answer(worker, request)

    def _answer(self, worker: str, request: Any) -> EncodeReply | DecodeResult:
        there = float(self._there[worker])
        if isinstance(request, DecodeRequest):
            timings = DecodeTimings(0.0, 0.0, 1, "memory", 0.0, DECODE_S, 1)
            return DecodeResult(
                request.request_id, request.window, (1,), (0.0,), -0.1, 0.0, "en", 0.0, "stop",
                timings, load=WorkerLoad(there, ROWS),
            )  # fmt: skip
        assert isinstance(request, EncodeRequest)
        handle = CrossKVHandle(
            request.request_id, request.window, request.attempt, worker, b"",
            str(request.pcm[0]), (1,), 1, 1500, 1, 1, "lease", 10.0,
        )  # fmt: skip
        load = WorkerLoad(there, 1.0, window_s=ENCODE_S)
        return EncodeReply(handle, EncodeTimings(0.0, ENCODE_S, 1), worker, load=load)


class FailingPools:
    """A router's pipeline over both pools. waits_s, errors: of windows that ended."""

    def __init__(self, encoders: int, decoders: int, fault: Fault = lambda *_: None) -> None:
        self.clock = virtual_clock()
        self.calls = OwnCalls(self.clock.monotonic)
        self.encoders = Workers("encoder", encoders, self.calls, fault)
        self.decoders = Workers("decoder", decoders, self.calls, fault)
        self.waits_s: list[float] = []
        self.errors: list[SplitscribeError] = []
        self.pipeline = Pipeline(
            ServePool(self.encoders, "encoder", self.calls),
            ServePool(self.decoders, "decoder", self.calls),
            load_settings(environ={}).router,
            silent_recorder(ROUTER_METRICS),
            clock=self.clock,
            reuses_kv=False,
        )

    async def send(self, samples: int = 0, seconds: float = PATIENCE_S) -> None:
        run = RequestRun(RequestContext.unlimited("a client's", seconds, self.clock))
        audio = WindowAudio.of_samples(0, np.full(16, samples, np.int16))
        begun_s = self.clock.monotonic()
        try:
            await self.pipeline.decode(run, audio, DecodeOptions())
        except SplitscribeError as error:
            self.errors.append(error)
        else:
            self.waits_s.append(self.clock.monotonic() - begun_s)

    async def load(self, per_s: float, windows: int, poisoned: float = 0.0) -> None:
        chance = random.Random(1)
        async with asyncio.TaskGroup() as requests:
            for _ in range(windows):
                await asyncio.sleep(chance.expovariate(per_s))
                samples = POISON if chance.random() < poisoned else 0
                requests.create_task(self.send(samples))

    def p95_s(self) -> float:
        return sorted(self.waits_s)[int(0.95 * len(self.waits_s))]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A line for each of thousands of failures would take most of the time."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def bad(name: str) -> Fault:
    return lambda worker, _: SequenceFailedError("not a number") if worker == name else None


def cut(worker: Hashable, request: Any) -> Exception | None:
    is_cut = worker == "decoder-0" and request.handle.agent == "encoder-0"
    return PeerLostError("encoder-0 is gone") if is_cut else None


def played(
    encoders: int, decoders: int, fault: Fault, work: Callable[[FailingPools], Awaitable[None]]
) -> FailingPools:
    async def play() -> FailingPools:
        pools = FailingPools(encoders, decoders, fault)
        await work(pools)
        return pools

    return run_virtually(play())


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("role", ["encoder", "decoder", "link"])
def test_one_that_fails_fast_costs_clients_nothing(role: str, workers: int) -> None:
    """Though it is the emptiest all the time; compared with a pool in which it is not there."""
    n_well = workers - (role != "link")
    sizes = {"encoder": (workers, 4), "decoder": (8, workers), "link": (workers, workers)}[role]
    well = {"encoder": (n_well, 4), "decoder": (8, n_well), "link": sizes}[role]
    per_s = USED * min(well[0] / ENCODE_S, well[1] * ROWS / DECODE_S)
    fault = cut if role == "link" else bad(f"{role}-0")

    async def load(pools: FailingPools) -> None:
        await pools.load(per_s, 100)

    usual = played(*well, lambda *_: None, load)
    failing = played(*sizes, only_decoders(fault) if role == "link" else fault, load)
    assert not usual.errors
    assert not failing.errors
    assert failing.p95_s() <= 1.5 * usual.p95_s()
    if role != "link":
        asked = getattr(failing, f"{role}s").asked[f"{role}-0"]
        assert asked <= 15, "it was the emptiest"


def only_decoders(fault: Fault) -> Fault:
    return lambda worker, request: (
        fault(worker, request) if isinstance(request, DecodeRequest) else None
    )


async def steady(pools: FailingPools) -> None:
    await pools.load(8.0, 300)


async def one_by_one(pools: FailingPools) -> None:
    """So that the others are empty, and one would get nothing once it has failed."""
    for _ in range(60):
        await pools.send()
        await asyncio.sleep(0.5)


def unwell(pools: FailingPools) -> set[str]:
    assert not pools.errors
    return {name for _, name in (*pools.encoders.told, *pools.decoders.told)}


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize(("load", "most"), [(steady, 15), (one_by_one, 8)])
def test_a_worker_that_fails_what_others_do_is_told_that_it_is_unwell(
    load: Callable[[FailingPools], Awaitable[None]], most: int, role: str
) -> None:
    """After a while aside, and a probe that failed, too; nobody else ever is."""
    pools = played(2, 2, bad(f"{role}-0"), load)
    assert unwell(pools) == {f"{role}-0"}
    workers = getattr(pools, f"{role}s")
    assert (f"{role}-0", f"{role}-0") in workers.told, "it has not heard so"
    assert workers.asked[f"{role}-0"] < most


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_that_answers_nothing_is_found_out_though_it_seems_well(role: str) -> None:
    async def load(pools: FailingPools) -> None:
        nonlocal well, answers
        await pools.load(8.0, 20)
        well, answers = getattr(pools, f"{role}s").asked[f"{role}-0"], False
        for _ in range(60):
            await pools.send(seconds=1000.0)

    def fault(worker: Hashable, _: Any) -> Exception | None:
        return None if answers or worker != f"{role}-0" else LostCallError("")

    well, answers = 0, True
    pools = played(2, 2, fault, load)
    assert unwell(pools) == {f"{role}-0"}
    assert getattr(pools, f"{role}s").asked[f"{role}-0"] - well < 8


def test_a_worker_that_reads_that_it_is_unwell_asks_to_be_replaced() -> None:
    worker: Any = object.__new__(PoolWorker)
    worker.ROLE, worker._name, worker._is_unwell = "encoder", "encoder-abc123-77", False
    worker._tracer, worker._engine = NO_TRACER, SimpleNamespace(healthy=lambda: None)
    for unwell in ("", "abc", "123", "abc124"):
        worker._span(EncodeRequest("r", 0, 1, np.zeros(1, np.int16), 1.0, unwell=unwell))
        worker.check_health()
    worker._span(EncodeRequest("r", 0, 1, np.zeros(1, np.int16), 1.0, unwell="abc123"))
    with pytest.raises(WorkerError, match="others do the same windows"):
        worker.check_health()


def test_an_encoder_whose_kv_no_decoder_can_use_is_told_that_it_is_unwell() -> None:
    def fault(worker: Hashable, request: Any) -> Exception | None:
        is_bad = isinstance(request, DecodeRequest) and request.handle.agent == "encoder-0"
        return SequenceFailedError("not a number") if is_bad else None

    assert unwell(played(2, 2, fault, steady)) == {"encoder-0"}


def test_poison_of_many_requests_takes_no_worker() -> None:
    """It fails everywhere, so that nobody is to blame; and others are not held up by it."""

    def fault(worker: Hashable, request: Any) -> Exception | None:
        is_poison = isinstance(request, DecodeRequest) and request.handle.layout_hash == str(POISON)
        return SequenceFailedError("not a number") if is_poison else None

    async def load(pools: FailingPools) -> None:
        await pools.load(5.0, 100, 0.3)
        workers = (*pools.encoders.names, *pools.decoders.names)
        assert not any(map(pools.calls.aside, workers))

    pools = played(2, 4, fault, load)
    assert not pools.calls.unwell
    assert {type(error) for error in pools.errors} == {SequenceFailedError}
    assert pools.p95_s() < 3 * (ENCODE_S + DECODE_S)


def test_one_that_is_well_again_is_found_out_by_a_probe() -> None:
    async def work(pools: FailingPools) -> None:
        nonlocal broken
        await pools.load(10.0, 40)
        assert pools.calls.aside("decoder-0") > 0.0
        broken = False
        before = pools.decoders.asked["decoder-0"]
        await asyncio.sleep(ASIDE_S)
        await pools.load(10.0, 80)
        assert not pools.calls.aside("decoder-0")
        assert pools.decoders.asked["decoder-0"] > before + 20, "it has its share again"

    broken = True
    fault = bad("decoder-0")
    assert not played(1, 2, lambda *one: fault(*one) if broken else None, work).errors


def test_the_last_worker_is_never_set_aside() -> None:
    def fault(worker: Hashable, request: Any) -> Exception | None:
        is_bad = isinstance(request, EncodeRequest) and request.attempt % 2
        return SequenceFailedError("now and then") if is_bad else None

    async def load(pools: FailingPools) -> None:
        await pools.load(2.0, 10 * N_WRONG)

    pools = played(1, 1, fault, load)
    assert not pools.errors
    assert not pools.calls.unwell
