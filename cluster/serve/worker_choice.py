"""Which worker of a pool gets a window: what each is known to hold, and the order to ask them in.

An encoder goes through windows one batch after another, so the best one is done with its queue
first; of those that are done about as soon, the one that encoded the same audio for this process,
or else the one that the audio prefers by rendezvous hashing: there its KV may be kept, and nobody
has to tell what is kept where. A decoder holds the KV of all its sequences at once, so the best one
has the emptiest pool, and of those about as empty the one next to the encoder that holds the KV. A
worker that has failed comes last: it has the least to do. Workers report their load twice a second,
or are asked for it where they are many; what this process has sent since then it knows itself.
Knows nothing of Serve: `cluster.serve.hooks.replica_choice` calls it.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cluster.messages import DecodeRequest, EncodeRequest, Location, WorkerLoad

# What the KV's way counts for, in parts of a decoder's pool: a worker that far away must be so
# much emptier.
SAME_DOMAIN = 0.1
ELSEWHERE = 0.25
# How much later than the first, in parts of the time that the window takes there, an encoder may be
# done and still be preferred for its kept KV: so never one that has such a window more to do.
ABOUT_AS_FREE = 0.5
# The same limit for the encoder where this process had the same audio encoded. If the KV is still
# kept there, the window does not wait; if it is not, it is encoded so much later, this once.
LIKELY_KEPT = 2.0
N_REMEMBERED = 4096  # windows of which a process knows where they were encoded


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the window. work: there now, as far as it is known."""

    key: Hashable
    load: WorkerLoad
    location: Location
    work: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call in progress: its worker, None until the choice, and what it counts for there."""

    worker: Hashable = None
    work: float = 0.0
    kv_key: bytes = b""


class WorkLedger:
    """Work of this process at each worker, and what others have there, as far as it is known.

    A worker's report is up to a second old. So others have what it reports beyond the most that
    this process had there in that time, and what this process has is counted here. Thread-safe:
    Serve may choose in a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[Hashable, _Sent] = {}  # by request
        self._own: dict[Hashable, float] = {}
        self._peaks: dict[Hashable, tuple[float, float]] = {}  # of the last two intervals
        self._others: dict[Hashable, float] = {}
        self._same: dict[bytes, list[Hashable]] = {}  # requests that were sent, by `kept_key`
        self._kept: dict[bytes, Hashable] = {}  # workers, by `kept_key`; the newest last

    def begin(self, request: Hashable) -> None:
        """A call begins: what is sent for it counts from now on, until `end`."""
        with self._lock:
            self._sent.setdefault(request, _Sent())

    def send(self, worker: Hashable, request: Hashable, work: float, kv_key: bytes = b"") -> None:
        """Count `work` there until `end`; a request is at one worker at a time.

        Nothing where the call has ended: Serve may still choose for one that was just cancelled.
        """
        with self._lock:
            if request in self._sent:
                self._send(request, _Sent(worker, work, kv_key))

    def place_of(self, kv_key: bytes, request: Hashable) -> Hashable:
        """Where the same KV is being made for another call of this process; None: nowhere."""
        with self._lock:
            same = (one for one in self._same.get(kv_key, ()) if one != request)
            return next((self._sent[one].worker for one in same), None)

    def move(self, worker: Hashable, request: Hashable) -> None:
        """It went to this worker instead; nothing where it has ended."""
        with self._lock:
            if (sent := self._sent.get(request)) is not None and sent.worker != worker:
                self._send(request, replace(sent, worker=worker))

    def keep(self, request: Hashable, kv_key: bytes) -> None:
        """The worker of this call has this KV, and keeps it for some time."""
        with self._lock:
            self._kept.pop(kv_key, None)
            if (sent := self._sent.get(request)) is not None:
                self._kept[kv_key] = sent.worker
            if len(self._kept) > N_REMEMBERED:
                del self._kept[next(iter(self._kept))]

    def kept_at(self, kv_key: bytes) -> Hashable:
        """Where it was made last, as far as this process remembers; None: unknown."""
        return self._kept.get(kv_key)

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

    def heard(self, worker: Hashable, work: float, own_before: float) -> None:
        """A worker that was asked says what is there now.

        own_before: what this process had there when it asked; see `own`.
        """
        with self._lock:
            own = max(own_before, self._own.get(worker, 0.0))
            self._others[worker] = max(0.0, work - own)

    def own(self, worker: Hashable) -> float:
        """What this process has there."""
        return self._own.get(worker, 0.0)

    def work(self, worker: Hashable) -> float:
        """All that is there now, as far as it is known."""
        return self._own.get(worker, 0.0) + self._others.get(worker, 0.0)

    def forget(self, worker: Hashable) -> None:
        """It is gone; what was sent there is at no worker until it is sent again."""
        with self._lock:
            for known in (self._own, self._peaks, self._others):
                known.pop(worker, None)

    def _send(self, request: Hashable, sent: _Sent) -> None:
        self._end(request)
        self._sent[request] = sent
        if sent.kv_key:
            self._same.setdefault(sent.kv_key, []).append(request)
        own = self._own[sent.worker] = self._own.get(sent.worker, 0.0) + sent.work
        before, now = self._peaks.get(sent.worker, (0.0, 0.0))
        self._peaks[sent.worker] = (before, max(now, own))

    def _end(self, request: Hashable) -> None:
        sent = self._sent.pop(request, _Sent())
        if sent.worker in self._own:
            self._own[sent.worker] -= sent.work
        if same := self._same.get(sent.kv_key):
            same.remove(request)
            if not same:
                del self._same[sent.kv_key]


def key_of(request: EncodeRequest | DecodeRequest) -> Hashable:
    """One call of a worker; Serve's own id is shared by all calls of one HTTP request."""
    return type(request), request.request_id, request.window, request.attempt


def kept_key(request: EncodeRequest) -> bytes:
    """Names the KV that is made of a window: its audio, in its context; empty: it is not kept."""
    return request.audio_key and request.audio_key + request.context.to_bytes(2, "big")


def shared_key(request: Any) -> bytes:
    """The same for a window that need not be encoded twice; empty for all else."""
    if isinstance(request, EncodeRequest) and not request.fresh:
        return kept_key(request)
    return b""


def work_of(request: Any) -> float:
    """What a request adds to a worker's `WorkerLoad.work`; 0 for one that is no window."""
    if isinstance(request, EncodeRequest):
        return request.work
    return float(request.options.n_rows) if isinstance(request, DecodeRequest) else 0.0


def ranked(
    request: Any,
    candidates: Iterable[Candidate],
    chance: random.Random,
    kept_at: Hashable = None,
    owner: Hashable = None,
) -> list[Hashable]:
    """The candidates' keys, the best one first; `chance` decides among equal ones.

    kept_at: as of `WorkLedger.kept_at`.
    owner: the encoder that the audio prefers; None: the one by rendezvous hashing of all candidates
        that are about as free, which is the same in every process where all are candidates.
    """
    workers = list(candidates)
    chance.shuffle(workers)
    if isinstance(request, DecodeRequest):
        workers.sort(key=lambda worker: _decoder_cost(worker, request.kv_location))
    elif isinstance(request, EncodeRequest):
        workers = _encoders_ranked(request, workers, kept_at, owner)
    workers.sort(key=lambda worker: worker.load.failed)  # the others keep their order
    return [worker.key for worker in workers]


def _encoders_ranked(
    request: EncodeRequest, workers: list[Candidate], kept_at: Hashable, owner: Hashable
) -> list[Candidate]:
    """By when they are done; of those that are done about first, the audio's own before them."""
    told_s = [worker.load.window_s for worker in workers if worker.load.window_s]
    usual_s = sorted(told_s)[len(told_s) // 2] if told_s else 1.0
    cost_s = {worker.key: _encoder_cost(worker, request.work, usual_s) for worker in workers}
    workers = sorted(workers, key=lambda worker: cost_s[worker.key])
    if kv_key := shared_key(request):
        first_s = cost_s[workers[0].key]
        one_s = request.work * (workers[0].load.window_s or usual_s)
        free = [one for one in workers if cost_s[one.key] < first_s + ABOUT_AS_FREE * one_s]
        if owner is None:
            own = max(free, key=lambda worker: affinity(kv_key, str(worker.key)))
        else:
            own = next((worker for worker in free if worker.key == owner), workers[0])
        if cost_s.get(kept_at, math.inf) <= first_s + LIKELY_KEPT * one_s:
            own = next(worker for worker in workers if worker.key == kept_at)
        return [own, *(worker for worker in workers if worker is not own)]
    return workers


def affinity(kv_key: bytes, worker: str) -> bytes:
    """The same in every process; each KV orders workers in its own way."""
    return hashlib.blake2b(worker.encode(), digest_size=8, key=kv_key).digest()


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
