"""The encoder's queue of windows: which go next, and when a batch is closed.

Order: by class first (`common.priorities`). Within a class windows whose time runs out go first;
the others by arrival, where late windows of a request and long ones count as having come some
seconds later: so a two-second clip passes a two-hour file, and no stream of clips, however dense,
keeps a window waiting for longer than that. Live windows go by arrival alone. Of bulk windows few
are in flight at a time, one if nobody asks for more, so that whoever comes waits for no more. A
batch is closed when it is full or its oldest window has waited long enough; after an idle time, at
once. Its windows are all of one context (`EncodeRequest`): that of the window whose turn it is. Of
windows with the same key one goes, and its duplicates wait for what becomes of it:
`take_duplicates` takes them out when they need no encode any more; if it failed, the next of them
goes. Thread-safe; knows no torch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from cluster.common.messages import (
    SAMPLE_RATE,
    WINDOW_SAMPLES,
    EncodeReply,
    EncodeRequest,
    Priority,
    request_key,
)
from cluster.common.priorities import URGENCY, Turns

# Window n of a request, from 0, counts as n / LATE_WINDOWS of LATE_S later than it came; all
# windows from LATE_WINDOWS on count as LATE_S later.
LATE_S, LATE_WINDOWS = 4.0, 8
LONG_S = 0.5  # and so much one of 30 s
URGENT_SHARE = 0.25  # of its time left: from then on a window goes before all that have more


@dataclass(slots=True, eq=False, weakref_slot=True)
class QueuedWindow:
    """One window that waits; times are of the batcher's clock.

    key: windows with the same one have the same KV; empty where that is not to be shared.
    """

    request: EncodeRequest
    future: Future[EncodeReply]
    arrived_s: float
    deadline_s: float
    key: bytes = b""

    @property
    def may_share(self) -> bool:
        """Whether the KV of another window with its key will do."""
        return bool(self.key) and not self.request.fresh

    @property
    def priority(self) -> Priority:
        return self.request.priority


class Batcher:
    """A queue between many callers and the one thread that owns the device.

    That thread calls `wait`, `pop` and, when the windows are done, `finish`.

    max_per_request: windows of one request in flight at a time, unless room would stay empty.
    bulk_at_once: bulk windows in flight at a time.
    """

    def __init__(
        self,
        max_batch: int,
        batch_wait_s: float,
        max_per_request: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        bulk_at_once: int = 1,
    ) -> None:
        self._max_batch = max_batch
        self._bulk_at_once = bulk_at_once
        self._batch_wait_s = batch_wait_s
        self._max_per_request = max_per_request or max(1, max_batch // 2)
        self._clock = clock
        self._queue: list[QueuedWindow] = []
        self._in_flight: Counter[str] = Counter()
        self._keys_in_flight: Counter[bytes] = Counter()
        self._work_in_flight = 0.0
        self._bulk_in_flight = 0
        self._holds_bulk = False
        self._turns = Turns()
        self._idle = True
        self._woken = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def n_distinct(self) -> int:
        """Waiting windows that need an encode each, as things stand."""
        with self._lock:
            return len(self._distinct(self._queue))

    @property
    def queued_audio_s(self) -> float:
        with self._lock:
            return sum(window.request.n_samples for window in self._queue) / SAMPLE_RATE

    @property
    def queued_work(self) -> float:
        """Of the waiting windows that need an encode of their own, as in `WorkerLoad`."""
        with self._lock:
            return sum(window.request.work for window in self._distinct(self._queue))

    @property
    def work(self) -> float:
        """Of all windows that wait or are in flight."""
        return self.queued_work + self._work_in_flight

    @property
    def has_full_batch(self) -> bool:
        """Whether windows of some context may go that fill a batch."""
        with self._lock:
            return self._fills_a_batch(self._ready_to_go())

    @property
    def slack_s(self) -> float:
        """The least time that a waiting window has left; infinite without any."""
        with self._lock:
            nearest = min((window.deadline_s for window in self._queue), default=float("inf"))
        return nearest - self._clock()

    @property
    def n_in_flight(self) -> int:
        with self._lock:
            return self._in_flight.total()

    def put(
        self, request: EncodeRequest, future: Future[EncodeReply], key: bytes = b""
    ) -> QueuedWindow:
        """Add a window; its remaining seconds become a deadline of this clock."""
        now = self._clock()
        window = QueuedWindow(request, future, now, now + request.remaining_s, key)
        with self._lock:
            self._queue.append(window)
            self._changed.notify_all()
        return window

    def cancel(self, window: QueuedWindow) -> bool:
        """Take a window out; False when it is not in the queue (any more)."""
        return bool(self._take_out(lambda one: one is window))

    def expire(self) -> list[QueuedWindow]:
        """Take out every window whose deadline has passed."""
        now = self._clock()
        return self._take_out(lambda window: window.deadline_s <= now)

    def wait(self, timeout_s: float) -> int:
        """Block until a batch is closed, a `wake`, or the timeout; the size of the batch, or 0."""
        end = self._clock() + timeout_s
        with self._lock:
            while True:
                wait_s = self.ready_in_s()  # the condition's lock may be taken again
                if wait_s == 0.0:
                    return min(len(self._ready_to_go()), self._max_batch)
                left_s = end - self._clock()
                if self._woken or left_s <= 0:
                    self._woken = False
                    return 0
                self._changed.wait(left_s if wait_s is None else min(wait_s, left_s))

    def hold_bulk(self, held: bool) -> None:
        """Whether bulk windows have to wait, unless it is their turn."""
        with self._lock:
            self._holds_bulk = held

    def wake(self) -> None:
        """Make the current (or the next) `wait` return."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def ready_in_s(self) -> float | None:
        """Seconds until a batch is closed as things stand. 0: now. None: once more windows come."""
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
        """Take the next windows of one context, at most `n_windows`.

        They are in flight until `finish`. Expired ones are left for `expire`, and those whose
        duplicate is in flight for `take_duplicates`.
        """
        now = self._clock()
        with self._lock:
            ordered = sorted(
                (window for window in self._queue if window.deadline_s > now),
                key=lambda window: _order(window, now),
            )
            waiting = alike = self._distinct(ordered)
            taken: list[QueuedWindow] = []
            while len(taken) < n_windows and (by_class := self._by_class(alike)):
                window = by_class[self._turns.next(by_class)][0]
                taken.append(window)
                self._in_flight[request_key(window.request)] += 1
                self._work_in_flight += window.request.work
                self._bulk_in_flight += window.priority == "bulk"
                if window.key:
                    self._keys_in_flight[window.key] += 1
                waiting = [one for one in waiting if one is not window]
                context = window.request.context
                alike = [one for one in waiting if one.request.context == context]
                self._turns.went(window.priority, {one.priority for one in waiting})
            self._queue = [window for window in self._queue if window not in taken]
            self._idle = False
            return taken

    def _by_class(self, ordered: Sequence[QueuedWindow]) -> dict[Priority, list[QueuedWindow]]:
        """The windows that may go, in order.

        Windows of requests that have enough windows in flight come last: they only take room
        that would stay empty.
        """
        in_flight, most = self._in_flight, self._max_per_request
        by_class: dict[Priority, list[QueuedWindow]] = {}
        for window in sorted(
            self._free_to_go(ordered), key=lambda one: in_flight[request_key(one.request)] >= most
        ):
            by_class.setdefault(window.priority, []).append(window)
        return by_class

    def finish(self, windows: Sequence[QueuedWindow]) -> None:
        """These windows are no longer in flight."""
        with self._lock:
            self._in_flight.subtract(request_key(window.request) for window in windows)
            self._in_flight = +self._in_flight  # drops requests at zero
            self._keys_in_flight.subtract(window.key for window in windows if window.key)
            self._keys_in_flight = +self._keys_in_flight
            self._work_in_flight -= sum(window.request.work for window in windows)
            self._bulk_in_flight -= sum(window.priority == "bulk" for window in windows)
            if not self._in_flight:
                self._work_in_flight = 0.0  # what rounding left

    def take_duplicates(self, key: bytes) -> list[QueuedWindow]:
        """Take out the waiting windows with this key, for which its KV will do."""
        return self._take_out(lambda window: window.key == key and window.may_share)

    def clear(self) -> list[QueuedWindow]:
        """Take everything out, in order of arrival."""
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
        """Those that do not wait for the KV of another one, in the same order."""
        taken: set[bytes] = set()
        distinct = []
        for window in windows:
            if window.may_share:
                if window.key in taken or window.key in self._keys_in_flight:
                    continue
                taken.add(window.key)
            distinct.append(window)
        return distinct

    def _ready_to_go(self) -> list[QueuedWindow]:
        return self._free_to_go(self._distinct(self._queue))

    def _free_to_go(self, windows: Sequence[QueuedWindow]) -> list[QueuedWindow]:
        """Those that may go as things stand: of bulk windows as many as may be in flight."""
        n_bulk = self._bulk_at_once - self._bulk_in_flight
        if self._holds_bulk and not self._turns.is_due("bulk"):
            n_bulk = 0
        free = []
        for window in windows:
            if window.priority == "bulk":
                n_bulk -= 1
                if n_bulk < 0:
                    continue
            free.append(window)
        return free

    def _fills_a_batch(self, windows: Sequence[QueuedWindow]) -> bool:
        """Whether so many of these have one context."""
        contexts = Counter(window.request.context for window in windows)
        return max(contexts.values(), default=0) >= self._max_batch


def _order(window: QueuedWindow, now: float) -> tuple[float, ...]:
    request = window.request
    urgency = URGENCY[request.priority]
    if now >= window.deadline_s - URGENT_SHARE * (window.deadline_s - window.arrived_s):
        return (urgency, 0, window.deadline_s)
    if request.priority == "live":  # its number is that of a session's update, which lasts
        return (urgency, 1, window.arrived_s)
    late = min(request.window, LATE_WINDOWS) / LATE_WINDOWS
    handicap_s = LATE_S * late + LONG_S * request.n_samples / WINDOW_SAMPLES
    return (urgency, 1, window.arrived_s + handicap_s)
