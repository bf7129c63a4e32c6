"""Choosing a worker by its load against Ray Serve's own choice, under skewed and even load.

    python -m benchmark.serving.routing [--rounds 5] [--seconds 20] [--rate 40]
        [--loads skewed even] [--asks]

Handles, replicas and the choice are real; the work is not: an encoder holds one window after
another, a decoder as many hypotheses as it has rows, and both sleep instead of computing, so that
two cores can stand for eight devices. Skewed: one of four encoders is half as fast as the others,
and one request in twelve decodes five beams of a long text. Two applications are up at the same
time, one for each way to choose; two clients send the same Poisson arrivals to one of them at a
time, in the order A B A (A is Serve's choice). What differs between the two A of a round is the
noise that a gain must leave behind. With `--asks` our choice is that of large pools, which ask.

Prints p50, p95 and p99 of encode and decode together by round, and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from cluster.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    Location,
    WorkerLoad,
)
from cluster.serve.hooks.ledger import PROCESS_LEDGER
from cluster.serve.ray_environment import ENVIRONMENT
from cluster.serve.serve_pool import ServePool

N_WORKERS, N_CLIENTS = 4, 2
WINDOW_S = 0.05  # of an encoder
N_ROWS = 16  # of a decoder
SHORT_S, LONG_S, BEAMS = 0.5, 1.5, 5
PCM = np.zeros(16_000, np.int16)
PERCENTILES = (50, 95, 99)
WAYS = ("serve", "ours")
LOADS = ("skewed", "even")
NO_NODE = Location("none")  # the KV is near nobody: distance is not what is compared
HANDLE = CrossKVHandle("", 0, 1, "none", b"", "", (), 0, 0, 0, 0, "", 10.0)


class SleepingEncoder:
    """Holds one window after another."""

    def __init__(self) -> None:
        self._hold_s = WINDOW_S
        self._windows = 0
        self._device = asyncio.Lock()

    async def slow_down(self, factor: float) -> None:
        self._hold_s = WINDOW_S * factor

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        self._windows += 1
        try:
            async with self._device:
                await asyncio.sleep(self._hold_s)
        finally:
            self._windows -= 1
        return EncodeReply(HANDLE, EncodeTimings(0.0, self._hold_s, 1))

    def record_routing_stats(self) -> dict[str, float]:
        return WorkerLoad(self._windows, window_s=self._hold_s).as_stats()


class SleepingDecoder:
    """Holds as many hypotheses as it has rows, the first come first."""

    def __init__(self) -> None:
        self._used = self._wanted = 0
        self._changed = asyncio.Condition()
        self._order: list[object] = []

    async def decode(self, request: DecodeRequest) -> None:
        n_rows, ticket = request.options.n_rows, object()
        self._wanted += n_rows
        self._order.append(ticket)
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._order[0] is ticket and self._used + n_rows <= N_ROWS
                )
                self._order.pop(0)
                self._used += n_rows
                self._changed.notify_all()
            try:
                await asyncio.sleep(request.remaining_s)  # how long it takes: see `Client`
            finally:
                async with self._changed:
                    self._used -= n_rows
                    self._changed.notify_all()
        finally:
            self._wanted -= n_rows

    def record_routing_stats(self) -> dict[str, float]:
        return WorkerLoad(self._wanted, N_ROWS).as_stats()


@dataclass(frozen=True)
class Work:
    """One client's share of a phase."""

    seed: int
    rate_per_s: float
    seconds: float
    skewed: bool


class Client:
    """A router's place: it alone knows what it has sent."""

    def __init__(self, encoders: Any, decoders: Any) -> None:
        self._encoders = ServePool(encoders, "encoder", PROCESS_LEDGER)
        self._decoders = ServePool(decoders, "decoder", PROCESS_LEDGER)

    async def run(self, work: Work) -> list[float]:
        """Seconds of each request, after the first fifth of them."""
        chance = random.Random(work.seed)
        arrivals, at = [], 0.0
        while (at := at + chance.expovariate(work.rate_per_s)) < work.seconds:
            is_long = work.skewed and chance.random() < 1 / 12
            arrivals.append((at, is_long, chance.uniform(0.5, 1.5)))
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(index, began_s + at, is_long, factor))
                for index, (at, is_long, factor) in enumerate(arrivals)
            ]
        return [task.result() for task in tasks][len(tasks) // 5 :]

    async def _one(self, index: int, at_s: float, is_long: bool, factor: float) -> float:
        await asyncio.sleep(at_s - time.monotonic())
        began_s, name = time.monotonic(), f"{id(self)}-{index}"
        reply = await self._encoders.encode(EncodeRequest(name, 0, 1, PCM, 60.0))
        options = DecodeOptions(beam_size=BEAMS if is_long else 1)
        takes_s = factor * (LONG_S if is_long else SHORT_S)
        await self._decoders.decode(
            DecodeRequest(name, 0, 1, reply.handle, options, takes_s, kv_location=NO_NODE)
        )
        return time.monotonic() - began_s


class Idle:
    """Holds an application's parts together."""

    def __init__(self, *parts: Any) -> None:
        """`parts`: handles."""


def application(way: str, asks: bool) -> Any:
    from ray import serve

    from cluster.serve.app import TOLD_WORKERS, replica_choice

    deployment: Any = serve.deployment

    def pool(role: str, cls: type, max_ongoing: int) -> Any:
        return deployment(
            cls,
            name=role,
            num_replicas=N_WORKERS,
            max_ongoing_requests=max_ongoing,
            ray_actor_options={"num_cpus": 0},
            **(replica_choice(TOLD_WORKERS + asks) if way == "ours" else {}),
        ).bind()

    encoders = pool("encoder", SleepingEncoder, 64)
    decoders = pool("decoder", SleepingDecoder, 272)
    clients = [
        deployment(
            Client, name=f"client-{n}", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10
        ).bind(encoders, decoders)
        for n in range(N_CLIENTS)
    ]
    return deployment(Idle, name="idle", ray_actor_options={"num_cpus": 0}).bind(*clients)


async def set_pace(serve: Any, way: str, skewed: bool) -> None:
    """Make one encoder slow, or none."""
    encoders = serve.get_deployment_handle("encoder", app_name=way)
    await encoders.broadcast("slow_down", 1.0).results_async(timeout_s=10)
    if skewed:
        await encoders.slow_down.remote(2.0)


async def phase(serve: Any, way: str, skewed: bool, seed: int, args: Any) -> list[float]:
    await set_pace(serve, way, skewed)
    clients = [serve.get_deployment_handle(f"client-{n}", app_name=way) for n in range(N_CLIENTS)]
    rate = args.rate / N_CLIENTS
    answers = await asyncio.gather(
        *(
            client.run.remote(Work(1000 * seed + n, rate, args.seconds, skewed))
            for n, client in enumerate(clients)
        )
    )
    return [seconds for answer in answers for seconds in answer]


async def measure(serve: Any, args: Any, console: Console) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:  # connections, caches
        console.log(f"warm-up: {way}")
        await phase(serve, way, False, 0, argparse.Namespace(rate=args.rate, seconds=4.0))
    for load in args.loads:
        table = Table(title=f"{load}: encode and decode, ms")
        for column in ("round", "A: Serve", "B: by load", "A: Serve", "B/A p95", "A/A p95"):
            table.add_column(column, no_wrap=True)
        p95: list[list[float]] = []  # of each round: A, B, A
        for round_ in range(args.rounds):
            found = []
            for way in ("serve", "ours", "serve"):
                console.log(f"{load}, round {round_ + 1}: {way}")
                seconds = await phase(serve, way, load == "skewed", round_ + 1, args)
                found.append([1000 * float(np.percentile(seconds, p)) for p in PERCENTILES])
            p95.append([values[1] for values in found])
            first, ours, second = p95[-1]
            table.add_row(
                str(round_ + 1),
                *(" / ".join(f"{value:.0f}" for value in values) for values in found),
                f"{2 * ours / (first + second):.2f}",
                f"{second / first:.2f}",
            )
            rows.append({"load": load, "round": round_ + 1, "ms": np.round(found, 1).tolist()})
        console.print(table)
        console.print(f"{load}: {verdict(p95)}. p50 / p95 / p99 in each cell")
    return rows


def verdict(p95: list[list[float]]) -> str:
    """By means over all rounds; and in how many of them B was below both of its A."""
    first, ours, second = (statistics.mean(column) for column in zip(*p95, strict=True))
    ratio, noise = 2 * ours / (first + second), abs(second / first - 1.0)
    below = sum(b < min(a, c) for a, b, c in p95)
    where = "outside" if ratio < 1.0 - noise else "inside"
    return (
        f"mean p95 by load / Serve's {ratio:.2f}; the two A differ by {100 * noise:.0f} %, so it "
        f"is {where} the noise; below both A in {below} of {len(p95)} rounds"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one phase")
    parser.add_argument("--rate", type=float, default=40.0, help="requests/s")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--asks", action="store_true", help="choose as pools of many workers do")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    ray.init(address="local", logging_level=logging.ERROR, log_to_driver=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    try:
        for way in WAYS:
            serve.run(application(way, args.asks), name=way, route_prefix=None)
        rows = asyncio.run(measure(serve, args, Console(stderr=True, width=120)))
    finally:
        with contextlib.suppress(RuntimeError):  # handles of a loop that has ended
            serve.shutdown()
        ray.shutdown()
    print_result("routing", {"rate": args.rate, "asks": args.asks, "rounds": rows})


if __name__ == "__main__":
    from benchmark.serving import routing  # so that replicas import its classes by their names

    routing.main()
