"""A crowd at one router's door and one encoder's queue: admission and batcher real, time simulated.

Short uploads of one length come at random. Who is admitted has one window, which waits in the real
batcher and takes its share of a batch's time. The client of an admitted request gives up after
two minutes. Windows of other classes come beside the crowd, past the admission, as
live sessions and bulk work do.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from cluster.common.errors import OverloadedError
from cluster.common.messages import EncodeReply, EncodeRequest, Priority
from encoder_worker.batcher import Batcher, QueuedWindow
from router.http.admission import BYTES_PER_AUDIO_S, Admission, AdmittedRequest
from router.interface import StageTimings

AUDIO_S = 5.0
DEADLINE_S = 120.0  # for which a client waits
BATCH = 8
WINDOW_S = 0.1  # of the encoder's time: ten windows a second
PCM = np.zeros(int(AUDIO_S * 16_000), np.int16)


@dataclass(frozen=True)
class Phase:
    """Arrivals until a moment, in windows a second by class."""

    until_s: float
    rates: dict[Priority, float]


@dataclass
class Crowd:
    """What came of each class: how many came, were refused, and were done in time, by second."""

    max_pending_audio_s: float
    seed: int = 1
    now_s: float = 0.0
    came: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: Counter[tuple[str, int]] = field(default_factory=Counter)
    done: Counter[tuple[str, int]] = field(default_factory=Counter)
    waits_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._admission = Admission(self.max_pending_audio_s, lambda: self.now_s)
        self._batcher = Batcher(BATCH, 0.005, clock=lambda: self.now_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._shares: dict[str, AdmittedRequest] = {}
        self._is_busy = False

    def run(self, *phases: Phase) -> Crowd:
        from_s = 0.0
        for phase in phases:
            for priority, rate in phase.rates.items():
                at_s = from_s
                while (at_s := at_s + self._chance.expovariate(rate)) < phase.until_s:
                    self._at(at_s, lambda priority=priority: self._arrive(priority))  # type: ignore[misc]
            from_s = phase.until_s
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            if self.now_s > from_s:
                break
            happen()
            self._start()
        return self

    def rate(self, counted: Counter[tuple[str, int]], priority: str, *between_s: int) -> float:
        """So many a second, of this class, between two moments."""
        return sum(counted[priority, at] for at in range(*between_s)) / (
            between_s[1] - between_s[0]
        )

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), happen))

    def _arrive(self, priority: Priority) -> None:
        self.came[priority, int(self.now_s)] += 1
        name = f"{priority}-{next(self._number)}"
        if priority == "interactive":
            try:
                share = self._admission.admit(int(AUDIO_S * BYTES_PER_AUDIO_S))
            except OverloadedError:
                self.refused[priority, int(self.now_s)] += 1
                return
            share.expect(AUDIO_S)
            self._shares[name] = share
        request = EncodeRequest(name, 0, 1, PCM, DEADLINE_S, priority=priority)
        future: Future[EncodeReply] = Future()
        window = self._batcher.put(request, future)
        self._at(self.now_s + DEADLINE_S, lambda: self._give_up(window))

    def _give_up(self, window: QueuedWindow) -> None:
        self._batcher.expire()
        self._leave(window)

    def _leave(self, window: QueuedWindow) -> None:
        if (share := self._shares.pop(window.request.request_id, None)) is not None:
            wait_s = self.now_s - window.arrived_s - WINDOW_S
            if self.now_s < window.deadline_s:
                share.done(StageTimings(first_queue_s=wait_s, windows=1, attempts=1))
            share.__exit__(None, None, None)

    def _start(self) -> None:
        """Begin a batch, as the encoder's thread does."""
        if self._is_busy:
            return
        ready_s = self._batcher.ready_in_s()
        if ready_s is None:
            return
        if ready_s > 0.0:
            self._at(self.now_s + ready_s, lambda: None)
            return
        batch = self._batcher.pop(BATCH)
        if batch:
            self._is_busy = True
            self._at(self.now_s + WINDOW_S * len(batch), lambda: self._finish(batch))

    def _finish(self, batch: list[QueuedWindow]) -> None:
        self._is_busy = False
        self._batcher.finish(batch)
        for window in batch:
            self._leave(window)
            if self.now_s < window.deadline_s:
                priority = window.request.priority
                self.done[priority, int(self.now_s)] += 1
                self.waits_s.setdefault(priority, []).append(self.now_s - window.arrived_s)
