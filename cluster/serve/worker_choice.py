"""Choose the worker of a pool for a window, from a few candidates ranked by `own_calls`.

Of a large pool some random workers and the preferred ones are candidates, so the cost is constant
and routers do not all choose the same empty worker. The best encoder finishes its queue first; of
about equal ones, the one that may have kept the KV of the same audio, known or by rendezvous
hashing. The best decoder has the emptiest pool; of about equal ones, one on the node of the KV.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.common.messages import DecodeRequest, EncodeRequest, WorkerLoad
from cluster.serve.own_calls import Link, OwnCalls, key_of

ELSEWHERE = 0.25  # cost of moving KV to another node, as a share of a decoder's pool
# How much later than the first encoder another one may finish and still be preferred, in multiples
# of the time that the window takes on the first:
ABOUT_AS_FREE = 0.5  # if rendezvous hashing prefers it; never one with another such window queued
LIKELY_KEPT = 2.0  # if this process had the same audio encoded there; the KV may be gone by now
AS_SOON = 0.1  # by chance; measured times of equal encoders always differ a little
FEW = 8  # largest pool whose workers are all compared
N_SAMPLED = 4  # random workers of a larger pool, beside the preferred ones
N_NEAR = 2  # decoders on the node of the KV
# Cost of a worker's `OwnCalls.trouble`: windows of an encoder, shares of a decoder's pool.
TROUBLE_WINDOWS = 8.0
TROUBLE_POOLS = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    key: Hashable
    load: WorkerLoad
    node: str
    trouble: float = 0.0


class Members:
    def __init__(self, places: Mapping[Hashable, str] | None = None) -> None:
        self._places = dict(places or {})
        self._keys = list(self._places)
        self._points = _points(self._keys)
        self._on_node: dict[str, list[Hashable]] = {}
        for key, node in self._places.items():
            self._on_node.setdefault(node, []).append(key)

    def choose(self, request: Any, calls: OwnCalls, chance: random.Random) -> list[Hashable]:
        """Return workers for `request`, the best one first, to which the call is recorded at once.

        So the next choice sees the window before it is sent.
        """
        order = ranked(
            request,
            self._compared(request, calls, chance),
            chance,
            calls.kept_at(shared_key(request)),
            calls.failed_at(key_of(request)) if work_of(request) else (),
        )
        if order and (work := work_of(request)):
            call, kv_key = key_of(request), shared_key(request)
            place, failed_at = calls.place_of(kv_key, call), calls.failed_at(call)
            is_well = place in self._places and calls.trouble(place) < 1.0
            probed = next((key for key in order if calls.aside(key) < 0.0), None)
            if probed is not None and not failed_at:
                order = [probed, *(key for key in order if key != probed)]
            elif is_well and place not in failed_at:
                order = [place, *(key for key in order if key != place)]
                work = 0.0  # the worker encodes it already
            calls.send(order[0], call, work, kv_key)
        return order

    def owner(self, kv_key: bytes) -> Hashable:
        return self._keys[int(np.argmax(_affinity(kv_key, self._points)))]

    def _compared(self, request: Any, calls: OwnCalls, chance: random.Random) -> list[Candidate]:
        keys: Iterable[Hashable] = self._keys
        if len(self._keys) > FEW:
            preferred = self._preferred(request, calls, chance)
            keys = dict.fromkeys([*preferred, *chance.sample(self._keys, N_SAMPLED)])
        places, encoder = self._places, calls.made_at(key_of(request)) if work_of(request) else None
        parts = {key: (key, Link(key, encoder)) for key in keys}
        well = [key for key, both in parts.items() if max(map(calls.aside, both)) <= 0.0]
        return [
            Candidate(key, calls.load(key), places[key], sum(map(calls.trouble, parts[key])))
            for key in well or parts
        ]

    def _preferred(self, request: Any, calls: OwnCalls, chance: random.Random) -> list[Hashable]:
        if isinstance(request, DecodeRequest):
            near = self._on_node.get(request.kv_node, [])
            return chance.sample(near, min(N_NEAR, len(near)))
        if kv_key := shared_key(request):
            kept_at = calls.kept_at(kv_key)
            return [self.owner(kv_key), *([kept_at] if kept_at in self._places else [])]
        return []


def shared_key(request: Any) -> bytes:
    if isinstance(request, EncodeRequest) and not request.fresh:
        return request.kept_key
    return b""


def work_of(request: Any) -> float:
    if isinstance(request, EncodeRequest):
        return request.work
    return float(request.options.n_rows) if isinstance(request, DecodeRequest) else 0.0


def ranked(
    request: Any,
    candidates: Iterable[Candidate],
    chance: random.Random,
    kept_at: Hashable = None,
    failed_at: Collection[Hashable] = (),
) -> list[Hashable]:
    """Return the candidates' keys, the best first; `chance` decides among equal ones."""
    workers = list(candidates)
    chance.shuffle(workers)
    if isinstance(request, DecodeRequest):
        usual = _usual(worker.load.capacity for worker in workers)
        workers.sort(key=lambda worker: _decoder_cost(worker, request.kv_node, usual))
    elif isinstance(request, EncodeRequest) and workers:
        workers = _encoders_ranked(request, workers, kept_at)
    workers.sort(key=lambda worker: worker.key in failed_at)  # the others keep their order
    return [worker.key for worker in workers]


def _encoders_ranked(
    request: EncodeRequest, workers: list[Candidate], kept_at: Hashable
) -> list[Candidate]:
    """Sort by the time at which they are done, but first the one that may have kept the KV."""
    usual_s = _usual(worker.load.window_s for worker in workers)
    cost_s = {worker.key: _encoder_cost(worker, request.work, usual_s) for worker in workers}
    first = min(workers, key=lambda worker: cost_s[worker.key])
    first_s, one_s = cost_s[first.key], request.work * (first.load.window_s or usual_s)
    workers = sorted(workers, key=lambda one: max(cost_s[one.key], first_s + AS_SOON * one_s))
    if kv_key := shared_key(request):
        free = [one for one in workers if cost_s[one.key] < first_s + ABOUT_AS_FREE * one_s]
        own = free[int(np.argmax(_affinity(kv_key, _points([one.key for one in free]))))]
        if cost_s.get(kept_at, math.inf) <= first_s + LIKELY_KEPT * one_s:
            own = next(worker for worker in workers if worker.key == kept_at)
        return [own, *(worker for worker in workers if worker is not own)]
    return workers


def _usual(known: Iterable[float]) -> float:
    told = sorted(one for one in known if one)
    return told[len(told) // 2] if told else 1.0


def _encoder_cost(worker: Candidate, work: float, usual_s: float) -> float:
    """Return the seconds until the worker would be done with one more such window."""
    windows = worker.load.work + work + TROUBLE_WINDOWS * worker.trouble
    return windows * (worker.load.window_s or usual_s)


def _decoder_cost(worker: Candidate, kv_node: str, usual: float) -> float:
    full = worker.load.work / (worker.load.capacity or usual)
    away = 0.0 if worker.node == kv_node else ELSEWHERE
    return full + TROUBLE_POOLS * worker.trouble + away


def _affinity(kv_key: bytes, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Rendezvous hashing: return uint64 [n], a score for each worker, mixed as in SplitMix64."""
    mixed = points ^ np.uint64(_point(kv_key))
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
    scores: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return scores


def _points(keys: Iterable[Hashable]) -> NDArray[np.uint64]:
    return np.fromiter((_worker_point(str(key)) for key in keys), np.uint64)


@lru_cache(maxsize=65536)
def _worker_point(name: str) -> int:
    return _point(name.encode())


def _point(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
