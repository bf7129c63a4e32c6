"""The encoder's queue of windows: chooses which go next and when a batch is closed.

A batch is closed when it is full, when its oldest window has waited long enough, or at once after
an idle time. All its windows have one context. Of windows with the same key only the most urgent is
encoded; its duplicates wait for its KV, and the next of them goes if it fails. No torch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from cluster.common.errors import OverloadedError
from cluster.common.fair_order import FairOrder
from cluster.common.messages import SAMPLE_RATE, EncodeReply, EncodeRequest, Priority
from cluster.common.priorities import URGENCY

MOST_QUEUED = 1024  # of each class; a window holds up to 1 MB of audio
RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class QueuedWindow:
    """A waiting window; times are of the batcher's clock."""

    request: EncodeRequest
    future: Future[EncodeReply]
    arrived_s: float
    deadline_s: float
    key: bytes = b""  # windows with equal keys have the same KV; empty: it is not to be shared

    @property
    def may_share(self) -> bool:
        return bool(self.key) and not self.request.fresh

    @property
    def priority(self) -> Priority:
        return self.request.priority

    @property
    def owner(self) -> bytes:
        return self.request.owner

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def work(self) -> float:
        return self.request.work


class Batcher:
    """Thread-safe. The thread that owns the device calls `wait`, `pop` and `finish`."""

    def __init__(
        self,
        max_batch: int,
        batch_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        bulk_at_once: int = 1,
    ) -> None:
        self._max_batch = max_batch
        self._bulk_at_once = bulk_at_once  # few, since more urgent windows wait for them
        self._batch_wait_s = batch_wait_s
        self._clock = clock
        self._queue: list[QueuedWindow] = []
        self._n_in_flight = 0
        self._keys_in_flight: Counter[bytes] = Counter()
        self._work_in_flight = 0.0
        self._bulk_in_flight = 0
        self._held: Collection[Priority] = ()
        self._order = FairOrder()
        self._idle = True
        self._woken = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def n_distinct(self) -> int:
        """Number of waiting windows that each need an encode of their own."""
        with self._lock:
            return len(self._distinct(self._queue))

    @property
    def queued_audio_s(self) -> float:
        with self._lock:
            return sum(window.request.n_samples for window in self._queue) / SAMPLE_RATE

    def queued_work(self, *, bulk: bool = False) -> float:
        """Work of the waiting windows that need an encode, in the unit of `WorkerLoad.work`."""
        with self._lock:
            distinct = self._distinct(self._queue)
            return sum(one.work for one in distinct if (one.priority == "bulk") == bulk)

    @property
    def work(self) -> float:
        """Work that waits or is in flight; waiting bulk windows give way and are left out."""
        return self.queued_work() + self._work_in_flight

    @property
    def has_full_batch(self) -> bool:
        with self._lock:
            return self._fills_a_batch(self._ready_to_go())

    @property
    def slack_s(self) -> float:
        with self._lock:
            nearest = min((window.deadline_s for window in self._queue), default=float("inf"))
        return nearest - self._clock()

    @property
    def n_in_flight(self) -> int:
        return self._n_in_flight

    def put(
        self, request: EncodeRequest, future: Future[EncodeReply], key: bytes = b""
    ) -> QueuedWindow:
        """Raises OverloadedError if too many windows of its class wait here."""
        now = self._clock()
        window = QueuedWindow(request, future, now, now + request.remaining_s, key)
        with self._lock:
            n_alike = sum(one.priority == window.priority for one in self._queue)
            if n_alike >= MOST_QUEUED:
                raise OverloadedError(
                    f"{n_alike} windows of this class wait for this encoder, the most it takes",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._queue.append(window)
            self._changed.notify_all()
        return window

    def cancel(self, window: QueuedWindow) -> bool:
        return bool(self._take_out(lambda one: one is window))

    def expire(self) -> list[QueuedWindow]:
        now = self._clock()
        return self._take_out(lambda window: window.deadline_s <= now)

    def wait(self, timeout_s: float) -> int:
        """Wait for a closed batch and return its size; 0 after a `wake` or the timeout."""
        end = self._clock() + timeout_s
        with self._lock:
            while True:
                wait_s = self.ready_in_s()  # the lock is reentrant
                if wait_s == 0.0:
                    return min(len(self._ready_to_go()), self._max_batch)
                left_s = end - self._clock()
                if self._woken or left_s <= 0:
                    self._woken = False
                    return 0
                self._changed.wait(left_s if wait_s is None else min(wait_s, left_s))

    def hold(self, classes: Collection[Priority]) -> None:
        """Make windows of these classes wait, except when it is their class's turn."""
        with self._lock:
            self._held = classes

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def ready_in_s(self) -> float | None:
        """Seconds until a batch is closed; None if that needs more windows to come."""
        with self._lock:
            waiting = self._ready_to_go()
            if not waiting:
                self._idle = self._idle or not self._queue
                return None
            if self._idle or self._fills_a_batch(waiting):
                return 0.0
            oldest_s = min(window.arrived_s for window in waiting)
            return max(0.0, oldest_s + self._batch_wait_s - self._clock())

    def pop(self, n_windows: int) -> list[QueuedWindow]:
        """Take up to `n_windows` windows of one context; they are in flight until `finish`."""
        now = self._clock()
        with self._lock:
            waiting = alike = self._distinct([w for w in self._queue if w.deadline_s > now])
            taken: list[QueuedWindow] = []
            while len(taken) < n_windows and (able := self._free_to_go(alike)):
                window = self._order.next(able)
                taken.append(window)
                self._n_in_flight += 1
                self._work_in_flight += window.work
                self._bulk_in_flight += window.priority == "bulk"
                if window.key:
                    self._keys_in_flight[window.key] += 1
                waiting = [one for one in waiting if one is not window]
                self._order.went(window, {one.priority for one in waiting})
                context = window.request.context
                alike = [one for one in waiting if one.request.context == context]
            self._queue = [window for window in self._queue if window not in taken]
            self._idle = False
            return taken

    def finish(self, windows: Sequence[QueuedWindow]) -> None:
        with self._lock:
            self._n_in_flight -= len(windows)
            self._keys_in_flight.subtract(window.key for window in windows if window.key)
            self._keys_in_flight = +self._keys_in_flight
            self._work_in_flight -= sum(window.request.work for window in windows)
            self._bulk_in_flight -= sum(window.priority == "bulk" for window in windows)
            if not self._n_in_flight:
                self._work_in_flight = 0.0  # removes rounding errors

    def take_duplicates(self, key: bytes) -> list[QueuedWindow]:
        """Take out the waiting windows that the KV under this key can answer."""
        return self._take_out(lambda window: window.key == key and window.may_share)

    def clear(self) -> list[QueuedWindow]:
        return self._take_out(lambda window: True)

    def _take_out(self, is_meant: Callable[[QueuedWindow], bool]) -> list[QueuedWindow]:
        with self._lock:
            taken: list[QueuedWindow] = []
            kept: list[QueuedWindow] = []
            for window in self._queue:
                (taken if is_meant(window) else kept).append(window)
            self._queue = kept
            return taken

    def _distinct(self, windows: Sequence[QueuedWindow]) -> list[QueuedWindow]:
        """The most urgent window of each key, without keys whose encode is in flight."""
        taken: set[bytes] = set()
        distinct = []
        for window in sorted(windows, key=lambda one: URGENCY[one.priority]):
            if window.may_share:
                if window.key in taken or window.key in self._keys_in_flight:
                    continue
                taken.add(window.key)
            distinct.append(window)
        return distinct

    def _ready_to_go(self) -> list[QueuedWindow]:
        """Windows that could go into batches now, with no more bulk than may start."""
        ready, n_bulk = [], self._bulk_at_once - self._bulk_in_flight
        for window in self._free_to_go(self._distinct(self._queue)):
            n_bulk -= window.priority == "bulk"
            if window.priority != "bulk" or n_bulk >= 0:
                ready.append(window)
        return ready

    def _free_to_go(self, windows: Sequence[QueuedWindow]) -> list[QueuedWindow]:
        held = {one for one in self._held if not self._order.turns.is_due(one)}
        if self._bulk_in_flight >= self._bulk_at_once:
            held.add("bulk")
        return [window for window in windows if window.priority not in held]

    def _fills_a_batch(self, windows: Sequence[QueuedWindow]) -> bool:
        contexts = Counter(window.request.context for window in windows)
        return max(contexts.values(), default=0) >= self._max_batch
