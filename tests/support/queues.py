"""Windows that queue at many encoders, on a virtual clock, with the real choice of a worker.

Only time and devices are simulated: each encoder does one window after another, and each takes as
long. Routers keep ledgers of their own, ask workers and choose by the code that serves.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.messages import EncodeRequest, Location, WorkerLoad
from cluster.serve.hooks.load_sample import LoadSample
from cluster.serve.worker_choice import Candidate, WorkLedger, ranked, shared_key

HOLD_S = 0.05  # of one window at an encoder
QUESTION_S = 0.001  # from a question to its answer
TOLD_S = 0.5  # between two reports of a worker, where Serve tells loads
PCM = np.zeros(1, np.int16)


@dataclass
class Outcome:
    """What came of a run.

    wait: holds that a window waited for others, in the mean. longest: of any queue. asked:
    questions that workers got, for each window.
    """

    wait: float
    longest: int
    asked: float


@dataclass
class Queues:
    """`routers` that send windows at `load` of what `workers` can do; `way`: asks, told, random."""

    workers: int
    routers: int
    load: float
    way: str
    seed: int = 1
    now_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._ledgers = [WorkLedger() for _ in range(self.routers)]
        places = {worker: Location(f"node-{worker}") for worker in range(self.workers)}
        self._samples = []
        for ledger in self._ledgers:
            sample = LoadSample(ledger, self._chance, lambda: self.now_s)
            sample.update(places)
            self._samples.append(sample)
        self._queue, self._told = [0] * self.workers, [0] * self.workers
        self._free_s = [0.0] * self.workers
        self._waits: list[float] = []
        self._longest = self._questions = 0

    def run(self, windows: int) -> Outcome:
        at_s = 0.0
        for number in range(windows):
            at_s += self._chance.expovariate(self.load * self.workers / HOLD_S)
            self._at(at_s, lambda number=number: self._arrive(number))  # type: ignore[misc]
        if self.way == "told":
            for worker in range(self.workers):
                first_s = TOLD_S * self._chance.random()
                self._at(first_s, lambda worker=worker: self._tell(worker, at_s))  # type: ignore[misc]
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        waits = self._waits[windows // 5 :]  # from when the queues are as long as they get
        return Outcome(sum(waits) / len(waits) / HOLD_S, self._longest, self._questions / windows)

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), happen))

    def _arrive(self, number: int) -> None:
        router = self._chance.randrange(self.routers)
        key = random.Random(number).randbytes(32)
        request = EncodeRequest(str(number), 0, 1, PCM, 30.0, audio_key=key)
        self._ledgers[router].begin(number)
        wait_s = 0.0
        if self.way == "asks":
            sample = self._samples[router]
            for worker in sample.to_ask(request):
                sample.ask(worker)
                self._questions += 1
                self._at(self.now_s + QUESTION_S, lambda worker=worker: self._hear(sample, worker))  # type: ignore[misc]
                wait_s = QUESTION_S
        self._at(self.now_s + wait_s, lambda: self._choose(number, router, request))

    def _hear(self, sample: LoadSample, worker: int) -> None:
        sample.heard(worker, WorkerLoad(self._queue[worker], 1.0, HOLD_S))

    def _tell(self, worker: int, until_s: float) -> None:
        self._told[worker] = self._queue[worker]
        for ledger in self._ledgers:
            ledger.report(worker, self._queue[worker])
        if self.now_s < until_s:
            self._at(self.now_s + TOLD_S, lambda: self._tell(worker, until_s))

    def _choose(self, number: int, router: int, request: EncodeRequest) -> None:
        ledger, sample = self._ledgers[router], self._samples[router]
        if self.way == "random":
            worker = self._chance.randrange(self.workers)
        else:
            candidates, owner = sample.compared(request), sample.owner(shared_key(request))
            if self.way == "told":
                candidates, owner = self._all(ledger), None
            worker = ranked(request, candidates, self._chance, owner=owner)[0]  # type: ignore[assignment]
        ledger.send(worker, number, 1.0)
        self._queue[worker] += 1
        self._longest = max(self._longest, self._queue[worker])
        begins_s = max(self.now_s, self._free_s[worker])
        self._waits.append(begins_s - self.now_s)
        self._free_s[worker] = begins_s + HOLD_S
        self._at(begins_s + HOLD_S, lambda: self._end(number, router, worker))

    def _all(self, ledger: WorkLedger) -> list[Candidate]:
        return [
            Candidate(worker, WorkerLoad(told, 1.0, HOLD_S), Location(""), ledger.work(worker))
            for worker, told in enumerate(self._told)
        ]

    def _end(self, number: int, router: int, worker: int) -> None:
        self._queue[worker] -= 1
        self._ledgers[router].end(number)
