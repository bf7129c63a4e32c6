"""This process's view of all workers, from its own calls and their answers: load and failures.

A failed window may itself be bad. If another worker completes it, those that took part in the
failed attempt are at fault: the worker, the encoder of its KV, or the link between both. After
`N_WRONG` such requests they get no windows for a while, and then one window as a probe.
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

N_REMEMBERED = 4096  # windows whose encoder or failures are remembered
HEARD_S = 1.0  # half-life of the work that other processes have at a worker
FORGIVEN_S = 10.0  # half-life of a worker's share of failures
NEWEST = 0.25  # weight of the last call in a worker's share of failures
N_WRONG = 3  # requests, with no success between, after which a worker is set aside
ASIDE_S = 10.0  # seconds without windows, also after each failed probe


class Link(NamedTuple):
    decoder: Hashable
    encoder: Hashable


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call in progress. worker: None until one is chosen."""

    worker: Hashable = None
    work: float = 0.0
    kv_key: bytes = b""


@dataclass(slots=True)
class _Worker:
    """others: work of other processes, at `heard_s`. failing: share of calls, at `ended_s`.

    wrong: requests since its last success that failed here and that others completed. aside_s: time
    until which it is set aside, or 0. is_probed: it was given a probe since.
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
    """Thread-safe, as Serve may choose workers in another thread.

    sizes: number of workers by deployment id. unwell: a worker whose probe failed too; calls report
    it, so that its health check fails.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sizes: dict[str, int] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: dict[Hashable, _Sent] = {}  # by call
        self._workers: dict[Hashable, _Worker] = {}
        self._same: dict[bytes, list[Hashable]] = {}  # calls, by `EncodeRequest.kept_key`
        self._kept: dict[bytes, Hashable] = {}  # workers, by the same; the newest last
        self._made: dict[Hashable, Hashable] = {}  # encoders, by request, window and attempt
        self._failed: dict[Hashable, set[Hashable]] = {}  # possibly at fault, by window
        self.unwell: Hashable = None

    def begin(self, call: Hashable) -> None:
        with self._lock:
            self._sent.setdefault(call, _Sent())

    def send(self, worker: Hashable, call: Hashable, work: float, kv_key: bytes = b"") -> None:
        """Record the choice, unless the call was cancelled meanwhile."""
        with self._lock:
            if call in self._sent:
                self._send(call, _Sent(worker, work, kv_key))

    def move(self, worker: Hashable, call: Hashable) -> None:
        with self._lock:
            if (sent := self._sent.get(call)) is not None and sent.worker != worker:
                self._send(call, replace(sent, worker=worker))

    def answered(self, call: Hashable, load: WorkerLoad | None, kept: bytes = b"") -> None:
        """kept: `EncodeRequest.kept_key` of KV that the worker now keeps for reuse."""
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
        """may_be_kv: the KV's encoder, or the link to it, may be at fault too."""
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
        """Note that a call was cancelled; its worker is at fault if another one completes it."""
        with self._lock:
            if (worker := self._sent.get(call, _Sent()).worker) in self._workers:
                self._suspect(call, {worker})

    def end(self, call: Hashable) -> None:
        with self._lock:
            self._end(call)

    def place_of(self, kv_key: bytes, call: Hashable = None) -> Hashable:
        """Return the worker that encodes the same KV for another call of this process, or None."""
        with self._lock:
            same = (one for one in self._same.get(kv_key, ()) if one != call)
            return next((self._sent[one].worker for one in same), None)

    def kept_at(self, kv_key: bytes) -> Hashable:
        """Return the live worker that this process last knows to keep the KV, or None."""
        worker = self._kept.get(kv_key)
        return worker if worker in self._workers else None

    def failed_at(self, call: Hashable) -> set[Hashable]:
        return self._failed.get(_window(call), set())

    def made_at(self, call: Hashable) -> Hashable:
        """Return the encoder of the KV that a decoder's call reads, or None."""
        if isinstance(call, tuple) and call[0] is DecodeRequest:
            return self._made.get(call[1:])
        return None

    def aside(self, worker: Hashable) -> float:
        """Return the seconds for which a worker gets no windows; 0: none; negative: probe it now.

        A worker that failed and had no window for `ASIDE_S` is probed too.
        """
        known = self._workers.get(worker)
        if known is None or not known.wrong:
            return 0.0
        if known.aside_s:
            return known.aside_s - self._clock()
        return min(0.0, known.ended_s + ASIDE_S - self._clock())

    def load(self, worker: Hashable) -> WorkerLoad:
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
