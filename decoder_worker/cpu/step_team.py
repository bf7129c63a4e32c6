"""Threads that help the engine's own with one computation after another.

If the system takes a helper's core within a unit, all wait for it; then helpers rest for a while.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster.common.priorities import let_encoder_go_first

# Indices of a team's int64 counters, each in a cache line of its own.
CLAIMED, DONE, WAITED = 0, 16, 32  # units; and phases that kept the leader waiting
N_COUNTERS = 48
# With as many units claimed and done, no job has any left to claim or to wait for.
ALL_UNITS = 1 << 62
# How long slow helpers rest. A short load is over soon, and asking a slow helper costs the leader
# the rest of another thread's time slice on the core, a few milliseconds.
LEAST_REST_S, MOST_REST_S = 0.02, 0.2

Job = Callable[[Any, int, bool], Any]  # counters, first unit, whether this thread leads


class StepTeam:
    """A leader, the first thread that calls `run`, and `n_helpers` threads.

    Any other thread does its jobs alone: the decoder's hurried thread has a higher priority than
    the helpers, and would wait for them.
    """

    def __init__(self, n_helpers: int) -> None:
        self._n_helpers = n_helpers
        self._helpers: list[_Helper] = []
        self._leader: int | None = None
        weakref.finalize(self, _end, self._helpers)
        self._begin_anew()

    def _begin_anew(self) -> None:
        _end(self._helpers)
        for helper in self._helpers:
            helper.thread.join()
        self._counters = new_counters()
        self._next_unit = 0
        self._rest_s, self._rests_until = LEAST_REST_S, 0.0
        self._helpers[:] = [_Helper(self._counters) for _ in range(self._n_helpers)]

    @property
    def rests(self) -> bool:
        """Whether the helpers rest now because they were slow."""
        return bool(self._helpers) and time.monotonic() < self._rests_until

    def run(self, job: Job, n_units: int) -> None:
        """Run a job of `n_units` to its end; an error on any thread ends it and is raised here."""
        thread = threading.get_ident()
        self._leader = self._leader or thread
        is_helped = thread == self._leader and time.monotonic() >= self._rests_until
        helpers = self._helpers if is_helped else []
        waited = self._counters[WAITED]
        self._lead(job, n_units, helpers)
        if not helpers:
            return
        if self._counters[WAITED] > waited:
            self._rest_s = min(MOST_REST_S, 2 * self._rest_s)
            self._rests_until = time.monotonic() + self._rest_s
        else:
            self._rest_s = LEAST_REST_S

    def _lead(self, job: Job, n_units: int, helpers: list[_Helper]) -> None:
        begin = self._next_unit
        self._next_unit += n_units
        try:
            for helper in helpers:
                helper.post(job, begin)
            job(self._counters, begin, True)
            for helper in self._helpers:  # one that came late to the job before may have failed
                if helper.error is not None:
                    raise helper.error
        except BaseException:
            leave_nothing(self._counters)
            self._begin_anew()
            raise


class _Helper:
    """A thread that runs the job posted last. error: raised by a job here."""

    def __init__(self, counters: Any) -> None:
        self._counters = counters
        self.error: Exception | None = None
        self._job: tuple[Job, int] | None = None
        self._posted = threading.Lock()  # unlocked while a posted job was not seen
        self._posted.acquire()
        self.thread = threading.Thread(target=self._main, name="decoder-helper", daemon=True)
        self.thread.start()

    def post(self, job: Job | None, begin: int) -> None:
        self._job = None if job is None else (job, begin)
        if self._posted.locked():
            self._posted.release()

    def _main(self) -> None:
        let_encoder_go_first()
        while True:
            self._posted.acquire()
            if (posted := self._job) is None:
                return
            job, begin = posted
            try:
                job(self._counters, begin, False)
            except Exception as error:  # such as MemoryError
                self.error = error
                leave_nothing(self._counters)
            del posted, job


def _end(helpers: list[_Helper]) -> None:
    for helper in helpers:
        helper.post(None, 0)


def leave_nothing(counters: Any) -> None:
    """Make all threads, the leader too, come to the end of their job, whatever was done."""
    counters[CLAIMED] = ALL_UNITS  # first, so that no phase begins behind one that is not done
    counters[DONE] = ALL_UNITS


def new_counters() -> Any:
    return np.zeros(N_COUNTERS, dtype=np.int64)
