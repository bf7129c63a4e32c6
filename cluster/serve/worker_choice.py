"""Which worker of a pool gets a window: a few candidates, ranked by what this process knows.

All of a small pool's workers are candidates, of a larger one some at random and those that the
window prefers: so a choice costs as much among 10,000 as among ten, and workers that seem empty to
all routers at once are not rushed. What is known is what `cluster.serve.own_calls` has.

An encoder goes through windows one batch after another, so the best one is done with its queue
first; of those that are done about as soon, the one that encoded the same audio for this process,
or else the one that the audio prefers by rendezvous hashing: there its KV may be kept, and nobody
has to tell what is kept where. A decoder holds the KV of all its sequences at once, so the best one
has the emptiest pool, and of those about as empty the one next to the encoder that holds the KV. A
worker whose calls failed is taken for a fuller one, and a window comes last where it has failed.
What is set aside gets nothing while there is another. Knows nothing of Serve: `cluster.serve.hooks`
calls it.
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

# What the KV's way to another node counts for, in parts of a decoder's pool: a worker there must be
# so much emptier.
ELSEWHERE = 0.25
# How much later than the first, in parts of the time that the window takes there, an encoder may be
# done and still be preferred for its kept KV: so never one that has such a window more to do.
ABOUT_AS_FREE = 0.5
# The same limit for the encoder where this process had the same audio encoded. If the KV is still
# kept there, the window does not wait; if it is not, it is encoded so much later, this once.
LIKELY_KEPT = 2.0
# The same limit within which they are equals, among which chance decides: what a window takes is
# measured, so that of equal encoders one would always seem to be the first.
AS_SOON = 0.1
FEW = 8  # workers that are all compared
N_SAMPLED = 4  # of more, beside those that the window prefers
N_NEAR = 2  # decoders on the node of the KV
# What a worker's `OwnCalls.trouble` counts for: windows in an encoder, parts of a decoder's pool.
TROUBLE_WINDOWS = 8.0
TROUBLE_POOLS = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    key: Hashable
    load: WorkerLoad
    node: str
    trouble: float = 0.0


class Members:
    """The workers of one pool, and who of them is compared for a window."""

    def __init__(self, places: Mapping[Hashable, str] | None = None) -> None:
        self._places = dict(places or {})
        self._keys = list(self._places)
        self._points = _points(self._keys)
        self._on_node: dict[str, list[Hashable]] = {}
        for key, node in self._places.items():
            self._on_node.setdefault(node, []).append(key)

    def choose(self, request: Any, calls: OwnCalls, chance: random.Random) -> list[Hashable]:
        """Workers for `request`, the best one first, which is counted in `calls` from now on.

        Windows that come together are counted before they are sent, so the next one sees the last.
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
                work = 0.0  # there it is encoded already
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
        """Encoders that may keep the audio's KV, or decoders next to the KV."""
        if isinstance(request, DecodeRequest):
            near = self._on_node.get(request.kv_node, [])
            return chance.sample(near, min(N_NEAR, len(near)))
        if kv_key := shared_key(request):
            kept_at = calls.kept_at(kv_key)
            return [self.owner(kv_key), *([kept_at] if kept_at in self._places else [])]
        return []


def shared_key(request: Any) -> bytes:
    """`EncodeRequest.kept_key` of a window that need not be encoded twice; empty for all else."""
    if isinstance(request, EncodeRequest) and not request.fresh:
        return request.kept_key
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
    failed_at: Collection[Hashable] = (),
) -> list[Hashable]:
    """The candidates' keys, the best one first; `chance` decides among equal ones."""
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
    """By when they are done; of those that are done about first, the audio's own before them.

    Equals stay in the order that they come in.
    """
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
    """For a worker that has told nothing yet: the median of the others."""
    told = sorted(one for one in known if one)
    return told[len(told) // 2] if told else 1.0


def _encoder_cost(worker: Candidate, work: float, usual_s: float) -> float:
    """Seconds until it would be done with this window more."""
    windows = worker.load.work + work + TROUBLE_WINDOWS * worker.trouble
    return windows * (worker.load.window_s or usual_s)


def _decoder_cost(worker: Candidate, kv_node: str, usual: float) -> float:
    """How full it is, in parts of its capacity, and how far away."""
    full = worker.load.work / (worker.load.capacity or usual)
    away = 0.0 if worker.node == kv_node else ELSEWHERE
    return full + TROUBLE_POOLS * worker.trouble + away


def _affinity(kv_key: bytes, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64 [n]: how much a KV prefers each worker. Bits are mixed as SplitMix64 does."""
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
