"""What fails alone gets little, then nothing, and is replaced; what fails everywhere harms nobody.

On a virtual clock, with the real pipeline, client, choice and memory of a router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import PeerLostError, SequenceFailedError, WorkerError
from cluster.common.messages import DecodeRequest, EncodeRequest
from cluster.common.tracing import NO_TRACER
from cluster.planning.virtual_time import run_virtually
from cluster.serve.own_calls import ASIDE_S, N_WRONG
from cluster.serve.replicas.workers import PoolWorker
from tests.support.failing_pools import (
    DECODE_S,
    ENCODE_S,
    POISON,
    ROWS,
    FailingPools,
    Fault,
    LostCallError,
)

USED = 0.4  # of what the workers that are well can do


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A line for each of thousands of failures would take most of the time."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def bad(name: str) -> Fault:
    return lambda worker, _: SequenceFailedError("not a number") if worker == name else None


def cut(worker: Hashable, request: Any) -> Exception | None:
    """The link between the first encoder and the first decoder."""
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


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_a_worker_that_fails_what_others_do_is_told_that_it_is_unwell(role: str) -> None:
    """After a while aside, and a probe that failed, too; nobody else ever is."""
    pools = played(2, 2, bad(f"{role}-0"), steady)
    told = [*pools.encoders.told, *pools.decoders.told]
    assert {name for _, name in told} == {f"{role}-0"}
    assert (f"{role}-0", f"{role}-0") in told, "it has not heard so"
    assert getattr(pools, f"{role}s").asked[f"{role}-0"] < 15
    assert not pools.errors


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_it_is_found_out_where_requests_come_one_by_one(role: str) -> None:
    """So that the others are empty, and it would get nothing once it has failed."""

    async def load(pools: FailingPools) -> None:
        for _ in range(60):
            await pools.send()
            await asyncio.sleep(0.5)

    pools = played(2, 2, bad(f"{role}-0"), load)
    assert {name for _, name in (*pools.encoders.told, *pools.decoders.told)} == {f"{role}-0"}
    workers = getattr(pools, f"{role}s")
    assert (f"{role}-0", f"{role}-0") in workers.told, "it has not heard so"
    assert workers.asked[f"{role}-0"] < 8
    assert not pools.errors


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_that_answers_nothing_is_found_out_though_it_seems_well(role: str) -> None:
    """And is the emptiest, once its calls were given up."""

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
    assert not pools.errors
    assert {name for _, name in (*pools.encoders.told, *pools.decoders.told)} == {f"{role}-0"}
    assert getattr(pools, f"{role}s").asked[f"{role}-0"] - well < 8


def test_a_worker_that_reads_that_it_is_unwell_asks_to_be_replaced() -> None:
    """What is said of others is none of its business."""
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
    """By nothing that it could see; the decoders that failed are not blamed."""

    def fault(worker: Hashable, request: Any) -> Exception | None:
        is_bad = isinstance(request, DecodeRequest) and request.handle.agent == "encoder-0"
        return SequenceFailedError("not a number") if is_bad else None

    pools = played(2, 2, fault, steady)
    assert {name for _, name in (*pools.encoders.told, *pools.decoders.told)} == {"encoder-0"}
    assert not pools.errors


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
    """Every other window fails once at each: nobody else could do better."""

    def fault(worker: Hashable, request: Any) -> Exception | None:
        is_bad = isinstance(request, EncodeRequest) and request.attempt % 2
        return SequenceFailedError("now and then") if is_bad else None

    async def load(pools: FailingPools) -> None:
        await pools.load(2.0, 10 * N_WRONG)

    pools = played(1, 1, fault, load)
    assert not pools.errors
    assert not pools.calls.unwell
