"""What this process knows of the workers of all pools, from its own calls and their answers.

Of each worker: what was sent there and is not answered, what others have there according to its
last answer, and how its last calls ended. Of each window: where it failed, and where its KV was
made. The more routers there are, the less each of them hears of a worker, so what others have there
is forgotten by and by. Serve makes its hook for routing from a class that is sent by value, so what
the hook shares with the pools' clients is `OWN_CALLS` here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.common.messages import DecodeRequest, EncodeRequest, WorkerLoad, request_key

N_REMEMBERED = 4096  # windows of which it is known where they were encoded, or where they failed
HEARD_S = 1.0  # after which half of what others had at a worker is taken to be done
FORGIVEN_S = 10.0  # after which half of a worker's failures are forgotten
NEWEST = 0.25  # what the last call counts for in a worker's share of failures


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call in progress: its worker, None until the choice, and what it counts for there."""

    worker: Hashable = None
    work: float = 0.0
    kv_key: bytes = b""


@dataclass(slots=True)
class _Worker:
    """others: work of other processes, at `heard_s`. failing: share of calls, at `ended_s`."""

    own: float = 0.0
    load: WorkerLoad = field(default_factory=WorkerLoad)
    others: float = 0.0
    heard_s: float = 0.0
    failing: float = 0.0
    ended_s: float = 0.0


class OwnCalls:
    """Thread-safe: Serve may choose in a thread of its own.

    sizes: how many workers each pool has, by its deployment's id, as Serve has told this process.
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
        self._failed: dict[Hashable, set[Hashable]] = {}  # workers, by window; the newest last

    def begin(self, call: Hashable) -> None:
        """What is sent for it counts from now on, until `end`."""
        with self._lock:
            self._sent.setdefault(call, _Sent())

    def send(self, worker: Hashable, call: Hashable, work: float, kv_key: bytes = b"") -> None:
        """Count `work` there until `end`; a call is at one worker at a time.

        Nothing where the call has ended: Serve may still choose for one that was just cancelled.
        """
        with self._lock:
            if call in self._sent:
                self._send(call, _Sent(worker, work, kv_key))

    def move(self, worker: Hashable, call: Hashable) -> None:
        """It went to this worker instead; nothing where it has ended."""
        with self._lock:
            if (sent := self._sent.get(call)) is not None and sent.worker != worker:
                self._send(call, replace(sent, worker=worker))

    def answered(self, call: Hashable, load: WorkerLoad | None, kept: bytes = b"") -> None:
        """Its worker did it, and says what else is there.

        kept: names the KV that the worker has from now on, and keeps for some time.
        """
        with self._lock:
            sent = self._sent.get(call, _Sent())
            self._failed.pop(_window(call), None)
            if kept and sent.worker is not None:
                _remember(self._kept, kept, sent.worker)
            if (known := self._workers.get(sent.worker)) is None:
                return
            self._note_end(known, failed=False)
            if load is not None:
                known.load, known.heard_s = load, self._clock()
                known.others = max(0.0, load.work - (known.own - sent.work))

    def failed(self, call: Hashable, *, is_worker_s_fault: bool) -> None:
        """Its worker could not do it; the window's next try should go to another."""
        with self._lock:
            worker = self._sent.get(call, _Sent()).worker
            if worker is not None:
                before = self._failed.get(_window(call), set())
                _remember(self._failed, _window(call), before | {worker})
            if is_worker_s_fault and (known := self._workers.get(worker)) is not None:
                self._note_end(known, failed=True)

    def end(self, call: Hashable) -> None:
        """It has its answer, or will have none."""
        with self._lock:
            self._end(call)

    def place_of(self, kv_key: bytes, call: Hashable = None) -> Hashable:
        """Where the same KV is being made for another call of this process; None: nowhere."""
        with self._lock:
            same = (one for one in self._same.get(kv_key, ()) if one != call)
            return next((self._sent[one].worker for one in same), None)

    def kept_at(self, kv_key: bytes) -> Hashable:
        """Where it was made last, as far as this process remembers; None: unknown."""
        return self._kept.get(kv_key)

    def failed_at(self, call: Hashable) -> set[Hashable]:
        """Where this call's window has failed before."""
        return self._failed.get(_window(call), set())

    def load(self, worker: Hashable) -> WorkerLoad:
        """With all the work that is there now, as far as it is known."""
        if (known := self._workers.get(worker)) is None:
            return WorkerLoad()
        others = known.others * _left(self._clock() - known.heard_s, HEARD_S)
        return replace(known.load, work=known.own + others)

    def trouble(self, worker: Hashable) -> float:
        """Failures of late for each success of late: 0 where all is well, and no upper bound."""
        if (known := self._workers.get(worker)) is None or not known.failing:
            return 0.0
        share = self._share(known)
        return share / (1.0 - share)

    def forget(self, worker: Hashable) -> None:
        """It is gone; what was sent there is at no worker until it is sent again."""
        with self._lock:
            self._workers.pop(worker, None)

    def _send(self, call: Hashable, sent: _Sent) -> None:
        self._end(call)
        self._sent[call] = sent
        if sent.kv_key:
            self._same.setdefault(sent.kv_key, []).append(call)
        self._workers.setdefault(sent.worker, _Worker()).own += sent.work

    def _end(self, call: Hashable) -> None:
        sent = self._sent.pop(call, _Sent())
        if (known := self._workers.get(sent.worker)) is not None:
            known.own = max(0.0, known.own - sent.work)
        if same := self._same.get(sent.kv_key):
            same.remove(call)
            if not same:
                del self._same[sent.kv_key]

    def _note_end(self, known: _Worker, *, failed: bool) -> None:
        share = self._share(known)
        known.failing, known.ended_s = share + (failed - share) * NEWEST, self._clock()

    def _share(self, known: _Worker) -> float:
        return known.failing * _left(self._clock() - known.ended_s, FORGIVEN_S)


def key_of(request: EncodeRequest | DecodeRequest) -> Hashable:
    """One call of a worker; Serve's own id is shared by all calls of one HTTP request."""
    return type(request), request_key(request), request.window, request.attempt


def _window(call: Hashable) -> Hashable:
    """The same for each try of a window at workers of one role."""
    return call[:3] if isinstance(call, tuple) else call


def _left(age_s: float, half_s: float) -> float:
    return float(0.5 ** (age_s / half_s))


def _remember(memory: dict[Any, Any], key: Hashable, value: Any) -> None:
    """As the newest of `N_REMEMBERED`."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > N_REMEMBERED:
        del memory[next(iter(memory))]


OWN_CALLS = OwnCalls()
