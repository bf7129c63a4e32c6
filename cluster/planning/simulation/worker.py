"""What a simulated worker is to those who call it: calls that are answered, or die with it.

It runs its engine's loop turn by turn: each turn is one step of the real loop, and the next one
begins when the device would be done. A worker that was killed answers nobody; who waits for it
learns so by Ray's error.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from cluster.errors import SplitscribeError
from cluster.messages import Location, WorkerLoad

Answer = asyncio.Future[Any]


class SimWorker(ABC):
    """One role of one replica. hop_s: seconds that an answer is under way."""

    def __init__(self, name: str, location: Location, hop_s: float, device: Device) -> None:
        """device: another role's too, where both are in one process."""
        self.device = device
        self.name = name
        self.location = location
        self.is_dead = False
        self.clock = WorkerClock(asyncio.get_running_loop().time)
        self._hop_s = hop_s
        self._event_loop = asyncio.get_running_loop()
        self._turn_at: asyncio.TimerHandle | None = None
        self._in_turn = self._woken = False
        self._calls: dict[Answer, None] = {}  # in order, so that a seed gives one result

    @abstractmethod
    def submit(self, request: Any) -> Future[Any]:
        """Into the engine; raises as the engine does."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """What it reports to those who choose a worker."""

    @abstractmethod
    def signals(self) -> dict[str, float]:
        """What it reports to the autoscaler."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Take nothing new."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether it holds nothing."""

    @abstractmethod
    def pages(self) -> tuple[int, int]:
        """Pages of its pool that are in use, and all of them."""

    @abstractmethod
    def queued(self) -> float:
        """Windows that wait here."""

    @abstractmethod
    def abandon(self, submitted: Future[Any]) -> None:
        """The caller left when the engine had its answer already."""

    @abstractmethod
    def turn(self) -> float | None:
        """One step of the engine's loop; seconds until the next one, None: when it is woken."""

    def call(self, request: Any) -> Answer:
        """Begin one call. The answer may be cancelled at any time."""
        answer = self._event_loop.create_future()
        if self.is_dead:
            self._event_loop.call_later(self._hop_s, _fail, answer, RayActorError())
            return answer
        try:
            submitted = self.submit(request)
        except SplitscribeError as error:
            self._event_loop.call_later(self._hop_s, _fail, answer, error)
            return answer
        self._calls[answer] = None
        answer.add_done_callback(partial(self._on_answer, submitted))
        submitted.add_done_callback(partial(self._on_done, answer))
        self.wake()
        return answer

    def wake(self) -> None:
        """There is something to do: begin a turn as soon as the thread is free."""
        self._woken = True
        if self.is_dead or self._in_turn:
            return
        free_at_s = self.clock.now()
        if self._turn_at is not None:
            if self._turn_at.when() <= free_at_s:
                return
            self._turn_at.cancel()
        self._turn_at = self._event_loop.call_at(free_at_s, self._take_turn)

    def kill(self, detected_after_s: float) -> None:
        """End it at once; its callers learn of it so much later."""
        self.is_dead = True
        if self._turn_at is not None:
            self._turn_at.cancel()
        for answer in tuple(self._calls):
            self._event_loop.call_later(detected_after_s, _fail, answer, RayActorError())

    def _take_turn(self) -> None:
        self._turn_at = None
        if self.is_dead:
            return
        self._in_turn, self._woken = True, False
        try:
            wait_s = self.turn()
        finally:
            self._in_turn = False
        if self._woken:
            wait_s = 0.0
        if wait_s is not None:
            at_s = self.clock.now() + wait_s
            self._turn_at = self._event_loop.call_at(at_s, self._take_turn)

    def _on_done(self, answer: Answer, submitted: Future[Any]) -> None:
        """The engine has answered, perhaps ahead of the loop's time."""
        if submitted.cancelled() or self.is_dead:
            return
        self._event_loop.call_at(self.clock.now() + self._hop_s, self._deliver, answer, submitted)

    def _deliver(self, answer: Answer, submitted: Future[Any]) -> None:
        if self.is_dead or answer.done():
            return
        error = submitted.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(submitted.result())

    def _on_answer(self, submitted: Future[Any], answer: Answer) -> None:
        self._calls.pop(answer, None)
        if answer.cancelled() and not self.is_dead and not submitted.cancel():
            self.abandon(submitted)
        if answer.cancelled():
            self.wake()


def _fail(answer: Answer, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


class WorkerClock:
    """Monotonic seconds of one thread of a worker."""

    def __init__(self, now: Callable[[], float]) -> None:
        """now: the time of the event loop."""
        self._loop_now = now
        self._ahead_to_s = 0.0

    def now(self) -> float:
        now_s, ahead_to_s = self._loop_now(), self._ahead_to_s
        return now_s if now_s > ahead_to_s else ahead_to_s  # quicker than max()

    def wait_until(self, at_s: float) -> None:
        """The thread waits for the device until then."""
        self._ahead_to_s = max(self._ahead_to_s, at_s)


class Device:
    """Does one thing after another, in the order in which they are launched.

    busy_s: of all that was launched. The roles of a colocated worker have one device together.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._free_at_s = 0.0

    def launch(self, now_s: float, seconds: float) -> float:
        """When something is done that is launched now and takes so long."""
        self._free_at_s = max(now_s, self._free_at_s) + seconds
        self.busy_s += seconds
        return self._free_at_s
