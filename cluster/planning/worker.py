"""A simulated worker of either role: its clock, its device, and the calls of those who wait for it.

An engine's step is a call that returns when the device is done. On a virtual clock it returns at
once, and the worker's own clock is ahead of the loop's by what the step would have taken. All that
a step decides it decides at its beginning, so this is exact; what it hands out is given to others
when the loop's clock has come so far. A worker that was killed answers nobody; who waits for it
learns so by Ray's error.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from cluster.common.clock import Clock
from cluster.common.errors import SplitscribeError
from cluster.common.kv.pool import PagePool
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.planning.profile import Profile
from cluster.planning.scenario import LoadRequest
from cluster.planning.transfer import Links

Answer = asyncio.Future[Any]


@dataclass(slots=True)
class Cell:
    """What all workers and routers of one simulated cell share.

    settings: with every `auto` resolved. random: all chance of the cell, from one seed.
    requests: those under way, by which a decoder knows how long a text is.
    """

    profile: Profile
    settings: Settings
    clock: Clock
    random: Random
    links: Links
    tokenizer: WhisperTokenizer
    requests: dict[str, LoadRequest] = field(default_factory=dict)

    @property
    def dims(self) -> Any:
        """What checks of layouts ask of a checkpoint's dimensions."""
        shape = self.profile.shape
        head_dim = shape.n_text_state // shape.n_text_head
        return SimpleNamespace(**shape.model_dump(), text_head_dim=head_dim)


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


class SimWorker(ABC):
    """One role of one replica. core: the real engine. pool: whose pages are counted."""

    core: Any
    pool: PagePool

    def __init__(self, cell: Cell, device: Device) -> None:
        self.device = device
        self.is_dead = False
        self.loop = asyncio.get_running_loop()
        self.clock = WorkerClock(self.loop.time)
        self._hop_s = cell.profile.router.hop_s  # that an answer is under way
        self._turn_at: asyncio.TimerHandle | None = None
        self._in_turn = self._woken = False
        self._calls: dict[Answer, None] = {}  # in order, so that a seed gives one result

    @abstractmethod
    def turn(self) -> float | None:
        """One step of the engine's loop; seconds until the next one, None: when it is woken."""

    @abstractmethod
    def signals(self) -> Any:
        """The dataclass that it reports to the autoscaler."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether it holds nothing."""

    def used_pages(self) -> int:
        """Pages of its pool that are in use."""
        return self.pool.n_used

    def abandon(self, submitted: Future[Any]) -> None:
        """The caller left when the engine had its answer already."""
        del submitted  # what it held came back with the answer

    def call(self, request: Any) -> Answer:
        """Begin one call. The answer may be cancelled at any time."""
        answer = self.loop.create_future()
        if self.is_dead:
            self.loop.call_later(self._hop_s, _fail, answer, RayActorError())
            return answer
        try:
            submitted = self.core.submit(request)
        except SplitscribeError as error:
            self.loop.call_later(self._hop_s, _fail, answer, error)
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
        self._turn_at = self.loop.call_at(free_at_s, self._take_turn)

    def kill(self, detected_after_s: float) -> None:
        """End it at once; its callers learn of it so much later."""
        self.is_dead = True
        if self._turn_at is not None:
            self._turn_at.cancel()
        for answer in tuple(self._calls):
            self.loop.call_later(detected_after_s, _fail, answer, RayActorError())

    def _take_turn(self) -> None:
        self._turn_at = None
        self._in_turn, self._woken = True, False
        try:
            wait_s = self.turn()
        finally:
            self._in_turn = False
        if self._woken:
            wait_s = 0.0
        if wait_s is not None:
            self._turn_at = self.loop.call_at(self.clock.now() + wait_s, self._take_turn)

    def _on_done(self, answer: Answer, submitted: Future[Any]) -> None:
        """The engine has answered, perhaps ahead of the loop's time."""
        if not submitted.cancelled() and not self.is_dead:
            at_s = self.clock.now() + self._hop_s
            self.loop.call_at(at_s, self._deliver, answer, submitted)

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
        if answer.cancelled():
            if not self.is_dead and not submitted.cancel():
                self.abandon(submitted)
            self.wake()


def _fail(answer: Answer, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
