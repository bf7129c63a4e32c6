"""One choice of a worker among N: a random one, all of them ranked, and a few that were asked."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from benchmark.serving.scale.figures import SIZES, Figure, cpu_us
from cluster.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeRequest,
    Location,
    WorkerLoad,
)
from cluster.serve.hooks.replica_choice import LoadAwareRouter
from cluster.serve.worker_choice import WorkLedger, key_of

POOL = DeploymentID("encoder", "scale")
PER_NODE = 8
HANDLE = CrossKVHandle("r", 0, 1, "none", b"", "", (), 0, 0, 0, 0, "", 10.0)
PCM = np.zeros(16, np.int16)


class Worker:
    """What the choice reads of Serve's `RunningReplica`."""

    def __init__(self, number: int) -> None:
        self.replica_id = ReplicaID(f"w{number:05d}", POOL)
        self.node_id = f"node-{number // PER_NODE}"
        self.routing_stats = WorkerLoad(number % 5, 16.0, 0.1).as_stats()
        self.replica_metadata = {"domain": f"rack-{number // 128}"}


def make_router(workers: list[Worker], *, asks: bool) -> LoadAwareRouter:
    router: Any = LoadAwareRouter(POOL, DeploymentHandleSource.REPLICA, None, None, True)
    router.initialize_state(ledger=WorkLedger(), chance=random.Random(0), asks=asks)
    router._note_replicas(workers)
    return router  # type: ignore[no-any-return]


def measure() -> list[Figure]:
    figures = []
    for size in SIZES:
        workers = [Worker(number) for number in range(size)]
        ceiling = _random_choice(workers)
        for name, asks in (("ranked of all, as in small pools", False), ("of a few asked", True)):
            router = make_router(workers, asks=asks)
            for role in ("encoder", "decoder"):
                ours = cpu_us(_choices(router, workers, role))
                figures.append(Figure(f"choice of {role}, {name}", size, "us", ceiling, ours))
    return sorted(figures, key=lambda figure: figure.what, reverse=True)


def _random_choice(workers: list[Worker]) -> float:
    chance, known = random.Random(0), {worker.replica_id: worker for worker in workers}
    return cpu_us(lambda: known[chance.choice(workers).replica_id])


def _choices(router: LoadAwareRouter, workers: list[Worker], role: str) -> Any:
    """One choice a call, each for another window; answers come at once."""
    requests = itertools.cycle([_request(number, workers, role) for number in range(1_000)])
    sample, ledger = router._sample, router._ledger
    load = WorkerLoad(2.0, 16.0, 0.1)

    def choose() -> None:
        request = next(requests)
        ledger.begin(key_of(request))
        if sample is not None:
            for worker in sample.to_ask(request):
                sample.ask(worker)
                sample.heard(worker, load)
        context = SimpleNamespace(should_backoff=False)
        pending: Any = SimpleNamespace(args=(request,), routing_context=context)
        candidates: Any = workers
        with suppress(StopIteration):  # the end of a coroutine that never waits
            router.choose_replicas(candidates, pending).send(None)
        ledger.end(key_of(request))

    return choose


def _request(number: int, workers: list[Worker], role: str) -> EncodeRequest | DecodeRequest:
    if role == "encoder":
        return EncodeRequest(str(number), 0, 1, PCM, 30.0, audio_key=number.to_bytes(32, "big"))
    beside = workers[number % len(workers)]
    place = Location(beside.node_id, beside.replica_metadata["domain"])
    return DecodeRequest(str(number), 0, 1, HANDLE, DecodeOptions(), 30.0, kv_location=place)
