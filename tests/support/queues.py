"""Windows that queue at many encoders, on a virtual clock, with the real choice of a worker."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.common.messages import EncodeRequest, WorkerLoad
from cluster.serve.own_calls import OwnCalls, key_of
from cluster.serve.worker_choice import Members

HOLD_S = 0.05  # of one window at an encoder
PCM = np.zeros(1, np.int16)


@dataclass
class Queues:
    """`routers` that send windows at `load` of what `workers` can do.

    at_random: instead of by the real choice.
    """

    workers: int
    routers: int
    load: float
    at_random: bool = False
    seed: int = 1
    now_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._calls = [OwnCalls(lambda: self.now_s) for _ in range(self.routers)]
        self.members = Members({n: f"node-{n}" for n in range(self.workers)})
        self._queue, self._free_s = [0] * self.workers, [0.0] * self.workers
        self._waits: list[float] = []

    def run(self, windows: int) -> float:
        """Holds that a window waited, in the mean."""
        at_s = 0.0
        for number in range(windows):
            at_s += self._chance.expovariate(self.load * self.workers / HOLD_S)
            self._at(at_s, lambda number=number: self._arrive(number))  # type: ignore[misc]
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        waits = self._waits[windows // 5 :]  # from when the queues are as long as they get
        return sum(waits) / len(waits) / HOLD_S

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), happen))

    def _arrive(self, number: int) -> None:
        key = random.Random(number).randbytes(32)
        request = EncodeRequest(str(number), 0, 1, PCM, 30.0, audio_key=key)
        calls = self._calls[self._chance.randrange(self.routers)]
        calls.begin(key_of(request))
        worker = self._chance.randrange(self.workers)
        if not self.at_random:
            worker = self.members.choose(request, calls, self._chance)[0]  # type: ignore[assignment]
        self._queue[worker] += 1
        begins_s = max(self.now_s, self._free_s[worker])
        self._waits.append(begins_s - self.now_s)
        self._free_s[worker] = begins_s + HOLD_S
        self._at(begins_s + HOLD_S, lambda: self._end(request, calls, worker))

    def _end(self, request: EncodeRequest, calls: OwnCalls, worker: int) -> None:
        self._queue[worker] -= 1
        load = WorkerLoad(self._queue[worker], window_s=HOLD_S)
        calls.answered(key_of(request), load, request.kept_key)
        calls.end(key_of(request))
