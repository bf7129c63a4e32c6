"""What this process knows of the workers of all pools, from its own calls and their answers.

Of each worker: what was sent there and is not answered, what others have there according to its
last answer, and how its last calls ended. Of each window: where it failed or was given up, and
where its KV was made. The more routers there are, the less each of them hears of a worker, so what
others have there is forgotten by and by.

A window that failed may be poison. But once others did it, whoever had a part before is wrong: a
worker, the encoder of the KV, the link between the two. Several requests in a row that prove one
wrong set it aside for a while; then it gets a probe, and if that proves it wrong too, it is told.
One request is enough for a probe where none comes by itself.
Serve makes its hook for routing from a class that is sent by value, so what the hook shares with
the pools' clients is `OWN_CALLS` here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cluster.common.messages import DecodeRequest, EncodeRequest, WorkerLoad

logger = logging.getLogger(__name__)

N_REMEMBERED = 4096  # windows of which it is known where they were encoded, or where they failed
HEARD_S = 1.0  # after which half of what others had at a worker is taken to be done
FORGIVEN_S = 10.0  # after which half of a worker's failures are forgotten
NEWEST = 0.25  # what the last call counts for in a worker's share of failures
N_WRONG = 3  # requests in a row that prove a worker wrong, whereupon it is set aside
ASIDE_S = 10.0  # for so long; and so long after each probe that was no success


class Link(NamedTuple):
    decoder: Hashable
    encoder: Hashable


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call in progress: its worker, None until the choice, and what it counts for there."""

    worker: Hashable = None
    work: float = 0.0
    kv_key: bytes = b""


@dataclass(slots=True)
class _Worker:
    """others: work of other processes, at `heard_s`. failing: share of calls, at `ended_s`.

    wrong: requests that it failed and others did, since its last success. aside_s: until when it
    is set aside, if it is. is_probed: it had a window since.
    """

    own: float = 0.0
    load: WorkerLoad = field(default_factory=WorkerLoad)
    others: float = 0.0
    heard_s: float = 0.0
    failing: float = 0.0
    ended_s: float = 0.0
    wrong: set[Hashable] = field(default_factory=set)
    aside_s: float = 0.0
    is_probed: bool = False


class OwnCalls:
    """Thread-safe: Serve may choose in a thread of its own.

    sizes: how many workers each pool has, by its deployment's id, as Serve has told this process.
    unwell: the worker, one at a time, that is to be told so, until it is gone or well.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds, from any beginning."""
        self.sizes: dict[str, int] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: dict[Hashable, _Sent] = {}  # by call
        self._workers: dict[Hashable, _Worker] = {}
        self._same: dict[bytes, list[Hashable]] = {}  # calls, by `EncodeRequest.kept_key`
        self._kept: dict[bytes, Hashable] = {}  # workers, by the same; the newest last
        self._made: dict[Hashable, Hashable] = {}  # encoders, by request, window and attempt
        self._failed: dict[Hashable, set[Hashable]] = {}  # who may be at fault, by window
        self.unwell: Hashable = None

    def begin(self, call: Hashable) -> None:
        with self._lock:
            self._sent.setdefault(call, _Sent())

    def send(self, worker: Hashable, call: Hashable, work: float, kv_key: bytes = b"") -> None:
        """Nothing where it has ended: Serve may still choose for one that was just cancelled."""
        with self._lock:
            if call in self._sent:
                self._send(call, _Sent(worker, work, kv_key))

    def move(self, worker: Hashable, call: Hashable) -> None:
        with self._lock:
            if (sent := self._sent.get(call)) is not None and sent.worker != worker:
                self._send(call, replace(sent, worker=worker))

    def answered(self, call: Hashable, load: WorkerLoad | None, kept: bytes = b"") -> None:
        """kept: names the KV that the worker has from now on, and keeps for some time."""
        with self._lock:
            sent = self._sent.get(call, _Sent())
            if isinstance(call, tuple) and call[0] is EncodeRequest:
                _remember(self._made, call[1:], sent.worker)
            else:
                self._note_done(call, sent.worker)
            if kept and sent.worker is not None:
                _remember(self._kept, kept, sent.worker)
            if (known := self._workers.get(sent.worker)) is None:
                return
            self._note_end(known, failed=False)
            if load is not None:
                known.load, known.heard_s = load, self._clock()
                known.others = max(0.0, load.work - (known.own - sent.work))

    def failed(self, call: Hashable, *, is_worker_s_fault: bool, may_be_kv: bool = False) -> None:
        """may_be_kv: the fault may lie with the KV that it was to read, or with the way there."""
        with self._lock:
            worker, encoder = self._sent.get(call, _Sent()).worker, self.made_at(call)
            if worker not in self._workers:
                return
            at_fault, link = {worker}, Link(worker, encoder)
            if may_be_kv and encoder in self._workers:
                at_fault |= {encoder, link}
                self._workers.setdefault(link, _Worker())
            self._suspect(call, at_fault)
            if known := self._workers.get(worker if is_worker_s_fault else link):
                self._note_end(known, failed=True)

    def given_up(self, call: Hashable) -> None:
        """Nobody waits for its answer. If its window is sent again, that came too late."""
        with self._lock:
            if (worker := self._sent.get(call, _Sent()).worker) in self._workers:
                self._suspect(call, {worker})

    def end(self, call: Hashable) -> None:
        with self._lock:
            self._end(call)

    def place_of(self, kv_key: bytes, call: Hashable = None) -> Hashable:
        """Where the same KV is being made for another call of this process; None: nowhere."""
        with self._lock:
            same = (one for one in self._same.get(kv_key, ()) if one != call)
            return next((self._sent[one].worker for one in same), None)

    def kept_at(self, kv_key: bytes) -> Hashable:
        """Where it was made last, as far as this process remembers; None: unknown, or gone."""
        worker = self._kept.get(kv_key)
        return worker if worker in self._workers else None

    def failed_at(self, call: Hashable) -> set[Hashable]:
        return self._failed.get(_window(call), set())

    def made_at(self, call: Hashable) -> Hashable:
        """The encoder of the KV that a decoder's call is to read; None: unknown."""
        if isinstance(call, tuple) and call[0] is DecodeRequest:
            return self._made.get(call[1:])
        return None

    def aside(self, worker: Hashable) -> float:
        """Seconds for which it is set aside; 0: it is not; below: it is to have a probe now.

        So is one that was proven wrong and had nothing since: others that are empty go before it.
        """
        known = self._workers.get(worker)
        if known is None or not known.wrong:
            return 0.0
        if known.aside_s:
            return known.aside_s - self._clock()
        return min(0.0, known.ended_s + ASIDE_S - self._clock())

    def load(self, worker: Hashable) -> WorkerLoad:
        """With all the work that is there now, as far as it is known."""
        if (known := self._workers.get(worker)) is None:
            return WorkerLoad()
        others = known.others * _left(self._clock() - known.heard_s, HEARD_S)
        return replace(known.load, work=known.own + others)

    def trouble(self, worker: Hashable) -> float:
        if (known := self._workers.get(worker)) is None or not known.failing:
            return 0.0
        share = self._share(known)
        return share / (1.0 - share)

    def forget(self, worker: Hashable) -> None:
        """It is gone; what was sent there is at no worker until it is sent again."""
        with self._lock:
            gone = [one for one in self._workers if isinstance(one, Link) and worker in one]
            for one in (worker, *gone):
                self._workers.pop(one, None)
            self.unwell = None if self.unwell == worker else self.unwell

    def _send(self, call: Hashable, sent: _Sent) -> None:
        self._end(call)
        self._sent[call] = sent
        if sent.kv_key:
            self._same.setdefault(sent.kv_key, []).append(call)
        known = self._workers.setdefault(sent.worker, _Worker())
        known.own += sent.work
        if self.aside(sent.worker) < 0.0:
            known.is_probed, known.aside_s = True, self._clock() + ASIDE_S

    def _end(self, call: Hashable) -> None:
        sent = self._sent.pop(call, _Sent())
        if (known := self._workers.get(sent.worker)) is not None:
            known.own = max(0.0, known.own - sent.work)
        if same := self._same.get(sent.kv_key):
            same.remove(call)
            if not same:
                del self._same[sent.kv_key]

    def _suspect(self, call: Hashable, at_fault: set[Hashable]) -> None:
        _remember(self._failed, _window(call), self.failed_at(call) | at_fault)

    def _note_done(self, call: Hashable, worker: Hashable) -> None:
        """Whoever had a part in it is well, and who had one when it failed is wrong."""
        encoder = self.made_at(call)
        well = {worker, encoder, Link(worker, encoder)}
        for one in well:
            if (known := self._workers.get(one)) is not None:
                known.wrong, known.aside_s, known.is_probed = set(), 0.0, False
        self.unwell = None if self.unwell in well else self.unwell
        for one in self._failed.pop(_window(call), set()) - well:
            if (known := self._workers.get(one)) is None:
                continue
            known.wrong.add(call[1] if isinstance(call, tuple) else call)
            if len(known.wrong) >= N_WRONG:
                logger.warning("%s is set aside: others do the windows that fail there", one)
                known.aside_s = self._clock() + ASIDE_S
                if known.is_probed and self.unwell is None and not isinstance(one, Link):
                    self.unwell = one

    def _note_end(self, known: _Worker, *, failed: bool) -> None:
        share = self._share(known)
        known.failing, known.ended_s = share + (failed - share) * NEWEST, self._clock()

    def _share(self, known: _Worker) -> float:
        return known.failing * _left(self._clock() - known.ended_s, FORGIVEN_S)


def key_of(request: EncodeRequest | DecodeRequest) -> Hashable:
    return type(request), request.key or request.request_id, request.window, request.attempt


def _window(call: Hashable) -> Hashable:
    return call[1:3] if isinstance(call, tuple) else call


def _left(age_s: float, half_s: float) -> float:
    return float(0.5 ** (age_s / half_s))


def _remember(memory: dict[Any, Any], key: Hashable, value: Any) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > N_REMEMBERED:
        del memory[next(iter(memory))]


OWN_CALLS = OwnCalls()
