"""Which few workers of a large pool are asked for their load before a window is sent, and compared.

In a small pool Serve tells every router every load. That grows with the workers times the routers,
and what was told twice a second is too old to balance by where many routers send to many workers.
In a larger pool a router asks, for each window, those that it prefers and others at random, two or
three in all: so neither the cost of a choice nor the questions that a worker gets depend on how
many workers there are. Two choices at random are nearly as good as all (Mitzenmacher, 2001). The
audio's own worker is found on a ring (consistent hashing: Karger and others, 1997), narrowed down
by rendezvous hashing among a few neighbours. Knows nothing of Serve, and asks nobody itself:
`cluster.serve.hooks.replica_choice` does.
"""

from __future__ import annotations

import hashlib
import random
import time
import zlib
from bisect import bisect, insort
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from cluster.messages import DecodeRequest, EncodeRequest, Location, WorkerLoad
from cluster.serve.worker_choice import Candidate, WorkLedger, affinity, shared_key

N_ASKED = 2  # for each window, of those that it prefers and at random; one at random at least
N_COMPARED = 4  # the newest answers; the preferred ones come on top
JUST_S = 0.02  # a worker that answered within this time is not asked again
FRESH_S = 0.5  # as old as a load may be that Serve tells; an older answer is not compared
N_ON_RING = 4  # neighbours on the ring, of which rendezvous hashing takes the audio's own
N_NEAR = 1  # decoders asked on the node of the KV, and as many in its domain
MANY = 16  # workers that join at once, from which on the ring is sorted anew


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a worker said of its load, and when, by the sample's clock."""

    load: WorkerLoad
    at_s: float


class LoadSample:
    """One process's view of one large pool. Not thread-safe: one event loop uses it."""

    def __init__(
        self,
        ledger: WorkLedger,
        chance: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: in seconds, from any beginning."""
        self._ledger = ledger
        self._chance = chance
        self._clock = clock
        self._places: dict[Hashable, Location] = {}
        self._workers: list[Hashable] = []
        self._ring: list[tuple[int, str]] = []  # by the hash of the worker's name
        self._named: dict[str, Hashable] = {}
        self._by_node: dict[str, list[Hashable]] = {}
        self._by_domain: dict[str, list[Hashable]] = {}
        self._answers: dict[Hashable, _Answer] = {}  # the newest last
        self._asked: dict[Hashable, float] = {}  # by worker, this process's work there then
        # What was found last, for it is asked for several times for each window.
        self._last_owner: tuple[bytes, Hashable] = (b"", None)
        self._last_preferred: tuple[object, list[Hashable]] = (None, [])

    def __len__(self) -> int:
        return len(self._workers)

    def update(self, places: Mapping[Hashable, Location]) -> None:
        """The pool's workers from now on; what is known of those that stay is kept."""
        gone = self._places.keys() - places.keys()
        for worker in gone:
            self._answers.pop(worker, None)
            self._asked.pop(worker, None)
        if gone:
            self._ring = [one for one in self._ring if self._named[one[1]] not in gone]
            self._named = {name: one for name, one in self._named.items() if one not in gone}
        new = [worker for worker in places if worker not in self._places]
        points = [(_point(str(worker).encode()), str(worker)) for worker in new]
        self._named |= dict(zip((name for _, name in points), new, strict=True))
        if len(points) > MANY:
            self._ring = sorted(self._ring + points)
        else:
            for point in points:
                insort(self._ring, point)
        self._last_owner, self._last_preferred = (b"", None), (None, [])
        self._places = dict(places)
        self._workers = list(places)
        self._by_node, self._by_domain = {}, {}
        for worker, place in places.items():
            self._by_node.setdefault(place.node, []).append(worker)
            self._by_domain.setdefault(place.domain, []).append(worker)

    def to_ask(self, request: object) -> list[Hashable]:
        """Workers whose answers the choice for `request` should wait for, for a moment."""
        since_s = self._clock() - JUST_S
        preferred = self._preferred(request)
        wanted = dict.fromkeys([*preferred, *self._some(max(1, N_ASKED - len(preferred)))])
        return [
            one for one in wanted if one not in self._asked and not self._answered(one, since_s)
        ]

    def ask(self, worker: Hashable) -> None:
        """It is being asked, from now until `heard` or `silent`."""
        self._asked[worker] = self._ledger.own(worker)

    def heard(self, worker: Hashable, load: WorkerLoad) -> None:
        """It has answered."""
        own = self._asked.pop(worker, 0.0)
        if worker not in self._places:
            return
        self._ledger.heard(worker, load.work, own)
        self._answers.pop(worker, None)
        self._answers[worker] = _Answer(load, self._clock())

    def silent(self, worker: Hashable) -> None:
        """It did not answer, so that nothing is known of it."""
        self._asked.pop(worker, None)
        self._answers.pop(worker, None)

    def is_working(self, worker: Hashable) -> bool:
        """Whether it is in the pool, and has not said that it has failed."""
        return worker in self._places and not self._last_known(worker).failed

    def compared(self, request: object) -> list[Candidate]:
        """The freshest known, and those whom the request prefers if they are fresh; never none.

        Where nobody has answered: some at random, by what this process has there itself.
        """
        answers, oldest_s = self._answers, self._clock() - FRESH_S
        found: dict[Hashable, WorkerLoad] = {}
        for worker in reversed(answers):
            answer = answers[worker]
            if answer.at_s < oldest_s or len(found) == N_COMPARED:
                break
            found[worker] = answer.load
        for worker in self._preferred(request):
            if (known := answers.get(worker)) is not None and known.at_s >= oldest_s:
                found[worker] = known.load
        if not found:
            found = {worker: self._last_known(worker) for worker in self._some(N_ASKED)}
        work, places = self._ledger.work, self._places
        return [
            Candidate(worker, load, places[worker], work(worker)) for worker, load in found.items()
        ]

    def owner(self, kv_key: bytes) -> Hashable | None:
        """The worker that the same audio prefers in every process; None without a key."""
        if not kv_key or not self._ring:
            return None
        if self._last_owner[0] != kv_key:
            first = bisect(self._ring, (_point(kv_key), ""))
            near = {self._ring[(first + step) % len(self._ring)][1] for step in range(N_ON_RING)}
            own = self._named[max(near, key=lambda name: affinity(kv_key, name))]
            self._last_owner = kv_key, own
        return self._last_owner[1]

    def _preferred(self, request: object) -> list[Hashable]:
        """Workers that may have the audio's KV, or decoders next to the KV."""
        if self._last_preferred[0] is request:
            return self._last_preferred[1]
        preferred: list[Hashable] = []
        if isinstance(request, EncodeRequest):
            kv_key = shared_key(request)
            preferred = [self._ledger.kept_at(kv_key), self.owner(kv_key)] if kv_key else []
        elif isinstance(request, DecodeRequest):
            turn = zlib.crc32(request.request_id.encode()) + request.window
            place = request.kv_location
            preferred = _in_turn(self._by_node.get(place.node, []), turn)
            if place.domain:
                preferred += _in_turn(self._by_domain.get(place.domain, []), turn)
        preferred = [one for one in preferred if one in self._places]
        self._last_preferred = request, preferred
        return preferred

    def _answered(self, worker: Hashable, since_s: float) -> bool:
        answer = self._answers.get(worker)
        return answer is not None and answer.at_s >= since_s

    def _last_known(self, worker: Hashable) -> WorkerLoad:
        answer = self._answers.get(worker)
        return answer.load if answer is not None else WorkerLoad()

    def _some(self, count: int) -> list[Hashable]:
        return self._chance.sample(self._workers, min(count, len(self._workers)))


def _in_turn(workers: list[Hashable], turn: int) -> list[Hashable]:
    """A few of them, so that each request's turn takes others."""
    count = min(N_NEAR, len(workers))
    return [workers[(turn + step) % len(workers)] for step in range(count)]


def _point(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
