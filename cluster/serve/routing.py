"""Which worker of a pool gets a window: what each is known to hold, and the order to ask them in.

An encoder goes through windows one batch after another, so the best one is done with its queue
first. A decoder holds the KV of all its sequences at once, so the best one has the emptiest pool,
and of those about as empty the one next to the encoder that holds the KV. Workers report their
load twice a second; what this process has sent since then it knows itself. Knows nothing of Serve:
`cluster.serve.hooks.replica_choice` calls it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from cluster.messages import DecodeRequest, EncodeRequest, Location, WorkerLoad

# What the KV's way counts for, in parts of a decoder's pool: a worker that far away must be so
# much emptier.
SAME_DOMAIN = 0.1
ELSEWHERE = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the window. work: there now, as far as it is known."""

    key: Hashable
    load: WorkerLoad
    location: Location
    work: float


class WorkLedger:
    """Work of this process at each worker, and what others have there, as far as it is known.

    A worker's report is up to a second old. So others have what it reports beyond the most that
    this process had there in that time, and what this process has is counted here. Thread-safe:
    Serve may choose in a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Calls in progress, by request: worker and work; the worker is None until the choice.
        self._sent: dict[Hashable, tuple[Hashable, float]] = {}
        self._own: dict[Hashable, float] = {}
        self._peaks: dict[Hashable, tuple[float, float]] = {}  # of the last two intervals
        self._others: dict[Hashable, float] = {}

    def begin(self, request: Hashable) -> None:
        """A call begins: what is sent for it counts from now on, until `end`."""
        with self._lock:
            self._sent.setdefault(request, (None, 0.0))

    def send(self, worker: Hashable, request: Hashable, work: float) -> None:
        """Count `work` there until `end`; a request is at one worker at a time.

        Nothing where the call has ended: Serve may still choose for one that was just cancelled.
        """
        with self._lock:
            if request in self._sent:
                self._send(worker, request, work)

    def move(self, worker: Hashable, request: Hashable) -> None:
        """It went to this worker instead; nothing where it has ended."""
        with self._lock:
            if (sent := self._sent.get(request)) is not None and sent[0] != worker:
                self._send(worker, request, sent[1])

    def end(self, request: Hashable) -> None:
        """It has its answer, or will have none."""
        with self._lock:
            self._end(request)

    def report(self, worker: Hashable, work: float) -> None:
        """A worker says what is there."""
        with self._lock:
            own, (before, now) = self._own.get(worker, 0.0), self._peaks.get(worker, (0.0, 0.0))
            self._others[worker] = max(0.0, work - max(before, now))
            self._peaks[worker] = (now, own)

    def work(self, worker: Hashable) -> float:
        """All that is there now, as far as it is known."""
        return self._own.get(worker, 0.0) + self._others.get(worker, 0.0)

    def forget(self, worker: Hashable) -> None:
        """It is gone; what was sent there is at no worker until it is sent again."""
        with self._lock:
            for known in (self._own, self._peaks, self._others):
                known.pop(worker, None)

    def _send(self, worker: Hashable, request: Hashable, work: float) -> None:
        self._end(request)
        self._sent[request] = (worker, work)
        own = self._own[worker] = self._own.get(worker, 0.0) + work
        before, now = self._peaks.get(worker, (0.0, 0.0))
        self._peaks[worker] = (before, max(now, own))

    def _end(self, request: Hashable) -> None:
        worker, work = self._sent.pop(request, (None, 0.0))
        if worker in self._own:
            self._own[worker] -= work


def key_of(request: EncodeRequest | DecodeRequest) -> Hashable:
    """One call of a worker; Serve's own id is shared by all calls of one HTTP request."""
    return type(request), request.request_id, request.window, request.attempt


def work_of(request: Any) -> float:
    """What a request adds to a worker's `WorkerLoad.work`; 0 for one that is no window."""
    if isinstance(request, EncodeRequest):
        return request.work
    return float(request.options.n_rows) if isinstance(request, DecodeRequest) else 0.0


def ranked(request: Any, candidates: Iterable[Candidate], chance: random.Random) -> list[Hashable]:
    """The candidates' keys, the best one first; `chance` decides among equal ones."""
    workers = list(candidates)
    chance.shuffle(workers)
    if isinstance(request, DecodeRequest):
        workers.sort(key=lambda worker: _decoder_cost(worker, request.kv_location))
    elif isinstance(request, EncodeRequest):
        told_s = [worker.load.window_s for worker in workers if worker.load.window_s]
        usual_s = sorted(told_s)[len(told_s) // 2] if told_s else 1.0
        workers.sort(key=lambda worker: _encoder_cost(worker, request.work, usual_s))
    return [worker.key for worker in workers]


def _encoder_cost(worker: Candidate, work: float, usual_s: float) -> float:
    """Seconds until it would be done with this window more."""
    return (worker.work + work) * (worker.load.window_s or usual_s)


def _decoder_cost(worker: Candidate, kv_location: Location) -> float:
    """How full it is, in parts of its capacity, and how far away."""
    return worker.work / worker.load.capacity + _distance(worker.location, kv_location)


def _distance(location: Location, kv_location: Location) -> float:
    if location.node == kv_location.node:
        return 0.0
    if location.domain and location.domain == kv_location.domain:
        return SAME_DOMAIN
    return ELSEWHERE
