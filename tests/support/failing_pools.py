"""Pools of which some workers, or some links, fail or lose whatever comes, on a virtual clock.

Real but for Serve's handle: `Pipeline`, `ServePool`, `Members` and `OwnCalls`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from cluster.common.errors import SplitscribeError
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
from cluster.common.settings import RouterSettings
from cluster.common.settings_sources import load_settings
from cluster.planning.virtual_time import virtual_clock
from cluster.serve.own_calls import OwnCalls
from cluster.serve.serve_pool import ServePool
from cluster.serve.worker_choice import Members
from router.interface import RequestContext
from router.pipeline import Pipeline, RequestRun, WindowAudio

ENCODE_S, DECODE_S = 0.05, 0.4
ROWS = 8  # windows that a decoder has at once; an encoder has one
FAILS_IN_S = 0.02
NEVER_S = 1e9
PATIENCE_S = 60.0
SETTINGS: RouterSettings = load_settings(environ={}).router
POISON = 7  # what the samples of a window are that every worker fails

Fault = Callable[[Hashable, Any], Exception | None]  # (worker, request) -> what to raise


class LostCallError(SplitscribeError):
    """Nobody sees it: the call is lost."""


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
            SETTINGS,
            silent_recorder(ROUTER_METRICS),
            clock=self.clock,
            reuses_kv=False,
        )

    async def send(self, samples: int = 0, seconds: float = PATIENCE_S) -> None:
        """One request of one window, whose samples are all the same."""
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
        """Windows that come by chance, this share of which is poisoned; until all have ended."""
        chance = random.Random(1)
        async with asyncio.TaskGroup() as requests:
            for _ in range(windows):
                await asyncio.sleep(chance.expovariate(per_s))
                samples = POISON if chance.random() < poisoned else 0
                requests.create_task(self.send(samples))

    def p95_s(self) -> float:
        return sorted(self.waits_s)[int(0.95 * len(self.waits_s))]
